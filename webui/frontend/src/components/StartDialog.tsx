/** Start an experiment: from a form made of its JSON Schema, or from YAML. */

import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { type Field, type Schema, type Section, sections, toYaml } from "../schema";
import { ask, openRun, refreshRuns, run, tryTo } from "../store";
import { Dialog } from "./dialogs";

interface Offer {
  schema: Schema;
  experiments: Record<string, string>;
}

export function StartDialog({ onClose }: { onClose(): void }) {
  const offer = useSignal<Offer | null>(null);
  const tab = useSignal<"yaml" | "form">("yaml");
  const chosen = useSignal("");
  const yaml = useSignal("");
  const values = useSignal<Record<string, string>>({});
  const problem = useSignal<string | null>(null);
  const isStarting = useSignal(false);

  useEffect(() => {
    void tryTo(ask<Offer>("schema")).then((found) => {
      if (!found) return;
      offer.value = found;
      chosen.value = "quickstart" in found.experiments ? "quickstart" : (Object.keys(found.experiments)[0] ?? "");
      yaml.value = found.experiments[chosen.value] ?? "";
    });
  }, []);

  const form = offer.value ? sections(offer.value.schema) : [];
  const text = (): string => (tab.value === "yaml" ? yaml.value : toYaml(form, values.value));

  const check = async (): Promise<boolean> => {
    try {
      problem.value = await ask<string | null>("check", { yaml: text() });
    } catch (error) {
      problem.value = error instanceof Error ? error.message : String(error);
    }
    return problem.value === null;
  };
  const start = async () => {
    isStarting.value = true;
    if (await check()) {
      const name = await tryTo(ask<string>("start", { yaml: text() }));
      if (name) {
        await refreshRuns();
        await openRun(name);
        onClose();
      }
    }
    isStarting.value = false;
  };

  return (
    <Dialog title="Start an experiment" onClose={onClose}>
      <div class="tabs" role="tablist">
        {(["yaml", "form"] as const).map((name) => (
          <button key={name} type="button" role="tab" aria-selected={tab.value === name} onClick={() => (tab.value = name)}>
            {name === "yaml" ? "YAML" : "Form"}
          </button>
        ))}
      </div>
      {tab.value === "yaml" ? (
        <>
          <label class="row">
            Begin with
            <select
              value={chosen.value}
              onChange={(event) => {
                chosen.value = event.currentTarget.value;
                yaml.value = offer.value?.experiments[chosen.value] ?? yaml.value;
              }}
            >
              {Object.keys(offer.value?.experiments ?? {}).map((name) => (
                <option key={name}>{name}</option>
              ))}
            </select>
            {run.value ? (
              <button type="button" class="quiet" onClick={() => (yaml.value = stripOrigins(run.value?.config_yaml ?? ""))}>
                this run's configuration
              </button>
            ) : null}
          </label>
          <textarea
            class="yaml"
            aria-label="YAML"
            spellcheck={false}
            rows={18}
            disabled={offer.value === null}
            value={yaml.value}
            onInput={(event) => (yaml.value = event.currentTarget.value)}
          />
        </>
      ) : (
        <div class="form">
          {form.map((section) => (
            <FormSection key={section.path} section={section} values={values.value} onChange={(path, value) => (values.value = { ...values.value, [path]: value })} />
          ))}
        </div>
      )}
      {problem.value ? (
        <p class="problem" role="alert">
          {problem.value}
        </p>
      ) : null}
      <footer>
        <button type="button" onClick={() => void check().then((isRight) => isRight && (problem.value = null))}>
          Check
        </button>
        <button type="button" class="primary" disabled={isStarting.value || !offer.value} onClick={() => void start()}>
          {isStarting.value ? "Starting …" : "Start"}
        </button>
      </footer>
    </Dialog>
  );
}

/** The configuration of a run names the origin of each value in a comment. */
function stripOrigins(yaml: string): string {
  return yaml.replace(/[ \t]+#[^\n]*$/gm, "");
}

function FormSection({
  section,
  values,
  onChange,
}: {
  section: Section;
  values: Readonly<Record<string, string>>;
  onChange(path: string, value: string): void;
}) {
  if (section.fields.length === 0) return null;
  return (
    <fieldset>
      <legend>{section.path || "experiment"}</legend>
      {section.about ? <p class="about">{section.about}</p> : null}
      {section.fields.map((field) => (
        <label key={field.path} class="field">
          <span>{field.name}</span>
          <Input field={field} value={values[field.path] ?? field.initial} onChange={(value) => onChange(field.path, value)} />
          <small>{field.about}</small>
        </label>
      ))}
    </fieldset>
  );
}

function Input({ field, value, onChange }: { field: Field; value: string; onChange(value: string): void }) {
  const common = { "aria-label": field.path, value };
  switch (field.kind) {
    case "choice":
      return (
        <select {...common} onChange={(event) => onChange(event.currentTarget.value)}>
          {field.choices.map((choice) => (
            <option key={choice}>{choice}</option>
          ))}
        </select>
      );
    case "boolean":
      return <input type="checkbox" aria-label={field.path} checked={value === "true"} onChange={(event) => onChange(String(event.currentTarget.checked))} />;
    case "json":
      return <textarea {...common} rows={2} spellcheck={false} placeholder="JSON" onInput={(event) => onChange(event.currentTarget.value)} />;
    case "text":
      return <input {...common} type="text" onInput={(event) => onChange(event.currentTarget.value)} />;
    default:
      return (
        <input {...common} type="number" step={field.kind === "integer" ? 1 : "any"} min={field.minimum} max={field.maximum} onInput={(event) => onChange(event.currentTarget.value)} />
      );
  }
}
