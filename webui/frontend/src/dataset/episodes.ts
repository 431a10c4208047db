/** The list of episodes and its filter. */

import type { EpisodeLine } from "./types";

/** "" for all, an outcome of the dataset, "given up" or "review". */
export type Kind = string;

export const GIVEN_UP = "given up";
export const REVIEW = "review";

function isOfKind(line: EpisodeLine, kind: Kind): boolean {
  if (kind === GIVEN_UP) return line.is_given_up;
  if (kind === REVIEW) return line.is_review;
  return kind === "" || line.outcome === kind;
}

/** Every kind that occurs, with how many episodes are of it; all of them first. */
export function kinds(lines: readonly EpisodeLine[]): [Kind, number][] {
  const outcomes = [...new Set(lines.map(({ outcome }) => outcome))].filter((outcome) => outcome !== "").sort();
  return ["", ...outcomes, GIVEN_UP, REVIEW]
    .map((kind): [Kind, number] => [kind, lines.filter((line) => isOfKind(line, kind)).length])
    .filter(([kind, count]) => kind === "" || count > 0);
}

/** Those of a kind whose task, step or number holds the text. */
export function chosen(lines: readonly EpisodeLine[], kind: Kind, text: string): EpisodeLine[] {
  const wanted = text.trim().toLowerCase();
  return lines.filter(
    (line) =>
      isOfKind(line, kind) &&
      (wanted === "" || `#${line.episode} ${line.step} ${line.task}`.toLowerCase().includes(wanted)),
  );
}
