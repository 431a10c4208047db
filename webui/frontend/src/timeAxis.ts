/** The time axis that all timelines share: moments to pixels and back. */

export interface Axis {
  readonly from: number;
  readonly to: number;
  readonly width: number; // pixels
}

export function toPixel(axis: Axis, t: number): number {
  return ((t - axis.from) / (axis.to - axis.from)) * axis.width;
}

export function toTime(axis: Axis, pixel: number): number {
  return axis.from + (pixel / axis.width) * (axis.to - axis.from);
}

const STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];

/** Round moments on the axis, at least `spacing` pixels apart. */
export function ticks(axis: Axis, spacing = 80): number[] {
  const wanted = ((axis.to - axis.from) / axis.width) * spacing;
  const step = STEPS.find((one) => one >= wanted) ?? 86400 * Math.ceil(wanted / 86400);
  const found: number[] = [];
  for (let n = Math.ceil(axis.from / step); n * step <= axis.to; n++) found.push(n * step);
  return found;
}
