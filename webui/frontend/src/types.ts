/** What the server sends; the Python side is `protocol.py`, `queries.py` and `board.py`. */

export type Camera = "agentview" | "wrist";
export const CAMERAS: readonly Camera[] = ["agentview", "wrist"];

export interface RunEntry {
  run: string;
  modified_at: number;
  may_be_live: boolean;
}

export interface Robot {
  robot: string;
  kind: string;
  policy: string;
  model: string;
  memory: string;
}

/** shift, is_review, start, end (null while it runs) */
export type Hours = [number, boolean, number, number | null];

export interface Opened {
  run: string;
  run_id: string;
  name: string;
  created_at: string;
  fps: number;
  config_yaml: string;
  git_revision: string | null;
  end_s: number;
  now_s: number;
  is_live: boolean;
  engine_url: string | null;
  robots: Robot[];
  series: string[];
  num_lines: number;
}

export interface RunList {
  runs: RunEntry[];
  is_read_only: boolean;
  can_launch: boolean;
}

/** shift, job, step, is_review, task, state, reason */
export type StepRow = [number, number, number, boolean, string, string, string | null];
/** attempt_id, place in steps, number, outcome, start, end, control steps, detail */
export type AttemptRow = [string, number, number, Outcome, number, number, number, string];
export type Outcome = "done" | "failed" | "infra";

export interface Board {
  revision: number;
  steps: StepRow[];
  ends: (number | null)[];
  attempts: AttemptRow[];
  hours: Hours[];
}

export interface Running {
  attempt_id: string;
  step: { key: { shift: number; job: number; step: number }; task: string };
  number: number;
  is_review: boolean;
  start_s: number;
}

export interface Moment {
  attempt_id: string;
  index: number;
  num_frames: number;
  t: number;
  is_over: boolean;
}

export interface Totals {
  steps: number;
  done: number;
  given_up: number;
  redone: number;
  attempts: number;
  calls: number;
}

export interface Shown {
  type: "shown";
  seek: number;
  t: number;
  now_s: number;
  is_live: boolean;
  is_finished: boolean;
  revision: number;
  totals: Totals;
  tiles: Record<string, Moment>;
}

export interface Changes {
  type: "changes";
  boards: Record<string, Board>;
  running: Record<string, Running>;
  series: string[];
}

export interface Reply {
  type: "reply";
  id: number;
  body: unknown;
  error: string | null;
}

export interface Ledger {
  computed: number;
  recomputed: number;
  reused: number;
  restored: number;
  recalled: number;
  generated: number;
  restored_bytes: number;
  recalled_bytes: number;
  restore_ms: number;
  recall_ms: number;
  prefill_ms: number;
  decode_ms: number;
}

export interface Exchange {
  idx: number;
  at: number;
  latency_s: number;
  shift: number;
  job: number | null;
  step: number | null;
  is_review: boolean;
  is_repair: boolean;
  message: string;
  reply: string;
  finish_reason: string;
  ledger: Ledger;
  recall_range: [number, number] | null;
  recalled: (number | null)[];
  present: (number | null)[];
  not_fitting: (number | null)[];
  problem: string;
  error: string;
}

export interface Talk {
  exchanges: Exchange[];
  has_earlier: boolean;
  has_later: boolean;
}

/** t, robot, kind, text, what a click leads to */
export type LogLine = [number, string, string, string, string | number | null];
export interface LogChunk {
  first: number;
  num_lines: number;
  lines: LogLine[];
}

/** lane, sent, answered, waiting, restore, prefill, decode, name, robot ("" for none), exchange */
export type LaneRow = [number, number, number, number, number, number, number, string, string, number | null];
export interface Lanes {
  num_lanes?: number;
  rows?: LaneRow[];
  profile?: Record<"t" | "waiting" | "restore" | "prefill" | "decode", number[]>;
}

/** t, low, high */
export type SeriesWindow = [number[], number[], number[]];

export interface AttemptDetail {
  attempt_id: string;
  robot: string;
  shift: number;
  job: number;
  step: number;
  number: number;
  is_review: boolean;
  task: string;
  outcome: Outcome;
  num_control_steps: number;
  start_s: number;
  end_s: number;
  detail: string;
  state: string | null;
  reason: string | null;
  siblings: [string, number, Outcome, boolean][];
  frame_times: number[];
  fault: { kind: string } | null;
  init_state_id: number | null;
  seed: number | null;
  num_images: Record<string, number>;
  talk: Exchange[];
}

export interface Jump {
  t: number;
  robot: string;
  attempt_id: string | null;
  exchange: number | null;
}

export interface SessionRow {
  session_id: string;
  window: number;
  is_parked: boolean;
  is_busy: boolean;
  num_system_tokens: number;
  num_window_tokens: number;
  num_recalled_tokens: number;
  num_archived_tokens: number;
  num_kv_blocks: number;
  num_turns: number;
}

export interface Task {
  task_id: number;
  title: string;
  state: "waiting" | "running" | "done" | "failed";
  num_done: number;
  num_total: number;
  detail: string;
  result: string | null;
  can_download: boolean;
}
