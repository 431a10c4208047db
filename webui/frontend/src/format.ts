/** Numbers and commands as the page writes them. */

export function clockTime(seconds: number, digits = 1): string {
  const sign = seconds < 0 ? "−" : "";
  const scale = 10 ** digits;
  const total = Math.floor(Math.abs(seconds) * scale + 1e-6);
  const whole = Math.floor(total / scale);
  const two = (value: number) => String(value).padStart(2, "0");
  const fraction = digits ? `.${String(total % scale).padStart(digits, "0")}` : "";
  return `${sign}${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}${fraction}`;
}

/** A label of the time axis: short where it can be; with tenths of a second where neighbours need them. */
export function axisTime(seconds: number, needsTenths = false): string {
  const whole = Math.round(seconds * 10) / 10;
  if (whole < 60) return Number.isInteger(whole) ? `${whole} s` : `${whole.toFixed(1)} s`;
  const minutes = Math.floor(whole / 60);
  const rest = needsTenths ? (whole % 60).toFixed(1).padStart(4, "0") : String(Math.round(whole % 60)).padStart(2, "0");
  return minutes < 60
    ? `${minutes}:${rest}`
    : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${rest}`;
}

export function compact(value: number): string {
  if (value >= 10_000) return `${(value / 1000).toFixed(0)}k`;
  if (value >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function milliseconds(seconds: number): string {
  return seconds < 1 ? `${(seconds * 1000).toFixed(0)} ms` : `${seconds.toFixed(2)} s`;
}

export function bytes(count: number): string {
  if (count >= 2 ** 30) return `${(count / 2 ** 30).toFixed(2)} GiB`;
  if (count >= 2 ** 20) return `${(count / 2 ** 20).toFixed(1)} MiB`;
  return `${(count / 2 ** 10).toFixed(0)} KiB`;
}

/** Numbers with their neighbours together: #1–#4, #7. */
export function spans(numbers: readonly (number | null)[]): string {
  const found: [number, number][] = [];
  for (const number of numbers) {
    if (number === null) continue;
    const last = found.at(-1);
    if (last && number === last[1] + 1) last[1] = number;
    else found.push([number, number]);
  }
  return found.map(([first, last]) => (first === last ? `#${first}` : `#${first}–#${last}`)).join(", ");
}

export interface Command {
  readonly verb: string;
  readonly text: string;
}

/** A planner's reply in words; null when it is no command of the protocol. */
export function readCommand(reply: string): Command | null {
  let body: unknown;
  try {
    body = JSON.parse(reply);
  } catch {
    return null;
  }
  if (typeof body !== "object" || body === null) return null;
  const command = body as Record<string, unknown>;
  if (Array.isArray(command["redo"])) {
    const steps = command["redo"] as { job: number; step: number; task: string }[];
    const listed = steps.map(({ job, step, task }) => `${job}.${step} ${task}`).join(", ");
    return { verb: "redo", text: listed || "nothing" };
  }
  if (command["action"] === "give_up") {
    const { shift, job, step, task } = command;
    return { verb: "give up", text: `${shift}.${job}.${step} ${task}` };
  }
  if (command["action"] === "execute") return { verb: "execute", text: String(command["task"]) };
  return command["action"] === "next" ? { verb: "next", text: "" } : null;
}
