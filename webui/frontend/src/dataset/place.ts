/** Addresses: of a frame of this dataset, and of the same moment in the page of the run. */

import type { Episode } from "./types";

export interface Place {
  readonly episode: number;
  readonly frame: number;
}

/** #episode=3&frame=25 */
export function readPlace(hash: string): Place {
  const fields = new URLSearchParams(hash.replace(/^#/, ""));
  const number = (name: string) => {
    const value = Number(fields.get(name) ?? 0);
    return Number.isInteger(value) && value >= 0 ? value : 0;
  };
  return { episode: number("episode"), frame: number("frame") };
}

export function writePlace({ episode, frame }: Place): string {
  return `#${new URLSearchParams({ episode: String(episode), frame: String(frame) })}`;
}

/** The run's page at a frame of this episode; null when the run is no longer there. */
export function runAddress(episode: Episode, frame: number): string | null {
  if (!episode.run || !episode.identity) return null;
  const fields = new URLSearchParams({ run: episode.run });
  const t = episode.recorded_at?.[frame];
  if (t !== undefined) fields.set("t", String(t)); // every digit: a rounded moment may show the frame before
  const robot = episode.facts["robot"];
  if (robot) fields.set("robot", String(robot));
  fields.set("attempt", episode.identity[1]);
  return `/#${fields}`;
}
