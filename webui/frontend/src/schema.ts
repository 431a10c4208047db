/** An experiment's JSON Schema as a form: which fields there are, and the YAML of what was filled in. */

export interface Schema {
  $ref?: string;
  $defs?: Record<string, Schema>;
  type?: string;
  description?: string;
  properties?: Record<string, Schema>;
  anyOf?: Schema[];
  enum?: unknown[];
  const?: unknown;
  default?: unknown;
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
  multipleOf?: number;
  items?: Schema;
}

export interface Field {
  readonly path: string; // "planner.window"
  readonly name: string;
  readonly kind: "text" | "number" | "integer" | "boolean" | "choice" | "json";
  readonly about: string;
  readonly choices: readonly string[];
  readonly initial: string; // as it is written into the form; "" for none
  readonly minimum?: number;
  readonly maximum?: number;
}

export interface Section {
  readonly path: string; // "" for the top level
  readonly about: string;
  readonly fields: readonly Field[];
}

/** The form's sections, in the schema's order. */
export function sections(schema: Schema): Section[] {
  return collect(schema, schema, "");
}

function collect(root: Schema, schema: Schema, path: string): Section[] {
  const fields: Field[] = [];
  const below: Section[] = [];
  for (const [name, raw] of Object.entries(schema.properties ?? {})) {
    const own = resolve(root, raw);
    const inner = path ? `${path}.${name}` : name;
    if (own.properties) below.push(...collect(root, own, inner));
    else fields.push(fieldOf(inner, name, own));
  }
  const about = ((schema.description ?? "").split("\n\n")[0] ?? "").replaceAll("`", "");
  return [{ path, about: path ? about : "", fields }, ...below];
}

/** The schema itself, references followed and "or nothing" left out. */
function resolve(root: Schema, schema: Schema): Schema {
  const { description, default: initial } = schema;
  let own = schema;
  if (own.anyOf) own = own.anyOf.find((one) => one.type !== "null") ?? own;
  if (own.$ref) own = root.$defs?.[own.$ref.split("/").at(-1) ?? ""] ?? own;
  const kept: Schema = { ...own };
  if (description !== undefined) kept.description = description;
  if (initial !== undefined) kept.default = initial;
  return kept;
}

function fieldOf(path: string, name: string, schema: Schema): Field {
  const initial = schema.default;
  const choices = (schema.enum ?? (schema.const !== undefined ? [schema.const] : [])).map(String);
  const kind = choices.length
    ? "choice"
    : schema.type === "integer" || schema.type === "number" || schema.type === "boolean"
      ? schema.type
      : schema.type === "string"
        ? "text"
        : "json";
  const minimum = schema.minimum ?? schema.exclusiveMinimum;
  return {
    path,
    name,
    kind,
    about: (schema.description ?? "").replace(/\s+/g, " ").replaceAll("`", ""),
    choices,
    initial: initial === undefined || initial === null ? "" : typeof initial === "string" ? initial : JSON.stringify(initial),
    ...(minimum === undefined ? {} : { minimum }),
    ...(schema.maximum === undefined ? {} : { maximum: schema.maximum }),
  };
}

/** The YAML of the fields that differ from their defaults; throws with one line for a field that cannot be read. */
export function toYaml(form: readonly Section[], values: Readonly<Record<string, string>>): string {
  const lines: string[] = [];
  for (const section of form) {
    const changed = section.fields.filter(({ path, initial }) => (values[path] ?? initial) !== initial);
    if (changed.length === 0) continue;
    const indent = section.path ? "  " : "";
    if (section.path) lines.push(`${section.path}:`);
    for (const field of changed) lines.push(`${indent}${field.name}: ${scalar(field, values[field.path] ?? "")}`);
  }
  return `${lines.join("\n")}\n`;
}

/** JSON is YAML: numbers, texts and lists are written as JSON. */
function scalar(field: Field, value: string): string {
  if (value === "") return "null";
  if (field.kind === "text" || field.kind === "choice") return JSON.stringify(value);
  try {
    return JSON.stringify(JSON.parse(value));
  } catch {
    throw new Error(`${field.path}: ${value} is not ${field.kind === "json" ? "JSON" : `a ${field.kind}`}`);
  }
}
