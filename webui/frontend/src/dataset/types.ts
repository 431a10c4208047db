/** What the server sends; the Python side is `dataset_view.py`. */

export interface EpisodeLine {
  readonly episode: number;
  readonly num_frames: number;
  readonly task: string;
  readonly step: string; // shift.job.step, "" where the dataset does not say
  readonly attempt: number | null;
  readonly outcome: string;
  readonly is_given_up: boolean;
  readonly is_review: boolean;
}

export interface Overview {
  readonly name: string;
  readonly fps: number;
  readonly cameras: readonly string[];
  readonly episodes: readonly EpisodeLine[];
}

/** A feature over the frames, one list per dimension. */
export interface Curve {
  readonly feature: string;
  readonly labels: readonly string[];
  readonly values: readonly (readonly (number | null)[])[];
}

/** Said on a frame, or (with a style) in force from it on. */
export interface Words {
  readonly frame_index: number;
  readonly role: string;
  readonly style: string;
  readonly content: string;
}

export interface Episode {
  readonly line: EpisodeLine;
  readonly facts: Readonly<Record<string, string | number | boolean | null>>;
  readonly curves: readonly Curve[];
  readonly words: readonly Words[];
  readonly as_recorded: Readonly<Record<string, boolean | null>>;
  readonly identity: readonly [string, string] | null; // run, attempt
  readonly run: string | null; // its name in the page of runs, if it is still there
  readonly recorded_at: readonly number[] | null;
}
