import { expect, it } from "vitest";
import { type Schema, sections, toYaml } from "../src/schema";

const SCHEMA: Schema = {
  properties: {
    name: { type: "string", default: "experiment" },
    planner: { $ref: "#/$defs/Planner", default: {} as unknown },
    faults: { type: "array", default: [], items: {} },
  },
  $defs: {
    Planner: {
      description: "Who decides.",
      properties: {
        memory: { $ref: "#/$defs/Memory", default: "recall_kv" },
        window: { type: "integer", minimum: 128, default: 8192 },
        base_url: { anyOf: [{ type: "string" }, { type: "null" }], default: null },
      },
    },
    Memory: { enum: ["off", "recall_kv"], type: "string" },
  },
};

it("a schema becomes a form", () => {
  const [top, planner] = sections(SCHEMA);
  expect(top?.fields.map(({ path, kind }) => [path, kind])).toEqual([["name", "text"], ["faults", "json"]]);
  expect(planner).toMatchObject({ path: "planner", about: "Who decides." });
  expect(planner?.fields.map(({ kind, initial }) => [kind, initial])).toEqual([
    ["choice", "recall_kv"],
    ["integer", "8192"],
    ["text", ""],
  ]);
  expect(planner?.fields[1]).toMatchObject({ minimum: 128 });
});

it("only what was changed is written", () => {
  const form = sections(SCHEMA);
  expect(toYaml(form, {})).toBe("\n");
  expect(toYaml(form, { "planner.window": "512", "planner.memory": "off", faults: '[{"kind": "push"}]' })).toBe(
    'faults: [{"kind":"push"}]\nplanner:\n  memory: "off"\n  window: 512\n',
  );
  expect(() => toYaml(form, { faults: "[" })).toThrow("faults: [ is not JSON");
});
