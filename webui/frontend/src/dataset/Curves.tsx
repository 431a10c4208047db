/** State, action and what else is a number on every frame, with uPlot. */

import { useEffect, useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import { color, theme } from "../theme";
import type { Axis } from "../timeAxis";
import { episode, fps, frame, frameAt, hover } from "./store";
import type { Curve } from "./types";

const NUM_COLORS = 8;
const ROW = 14; // a label's height: a chart is as high as its labels
const MIN_HEIGHT = 56;

interface Line {
  readonly label: string;
  readonly values: readonly (number | null)[];
}

interface Chart {
  readonly title: string;
  readonly lines: readonly Line[];
  readonly isStepped: boolean; // a value that holds for its control step
}

/** A chart per feature; single numbers with the same beginning (next.reward, next.done) share one. */
export function chartsOf(curves: readonly Curve[]): Chart[] {
  const charts = new Map<string, Line[]>();
  for (const { feature, labels, values } of curves) {
    const parts = feature.split(".");
    const title = values.length > 1 ? feature.replace("observation.", "") : parts.slice(0, -1).join(".") || feature;
    const lines = charts.get(title) ?? [];
    charts.set(title, [...lines, ...labels.map((label, i) => ({ label, values: values[i] ?? [] }))]);
  }
  return [...charts].map(([title, lines]) => ({ title, lines, isStepped: !title.includes("state") }));
}

export function Curves({ axis }: { axis: Axis }) {
  const curves = episode.value?.curves;
  const charts = useMemo(() => chartsOf(curves ?? []), [curves]);
  return (
    <>
      {charts.map((chart) => (
        <CurveChart key={chart.title} chart={chart} axis={axis} />
      ))}
    </>
  );
}

const hue = (place: number) => `curve-${(place % NUM_COLORS) + 1}`;

function CurveChart({ chart, axis }: { chart: Chart; axis: Axis }) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const scheme = theme.value;
  const height = Math.max(MIN_HEIGHT, (chart.lines.length + 1) * ROW);

  useEffect(() => {
    if (!place.current) return;
    const times = chart.lines[0]?.values.map((_, i) => i / fps.value) ?? [];
    const data = [times, ...chart.lines.map(({ values }) => values)] as uPlot.AlignedData;
    plot.current = new uPlot(options(chart, axis, height), data, place.current);
    return () => plot.current?.destroy();
  }, [chart, scheme, axis.to]);
  useEffect(() => plot.current?.setSize({ width: axis.width, height }), [axis.width, height]);

  const shown = hover.value === null ? frame.value : frameAt(hover.value);
  return (
    <div class="lane-group">
      <div class="gutter">
        <span class="gutter-title">{chart.title}</span>
        {chart.lines.map(({ label, values }, i) => (
          <span key={label} class="series-value">
            <i style={{ background: `var(--${hue(i)})` }} />
            {label} <b>{valueText(values[shown])}</b>
          </span>
        ))}
      </div>
      <div ref={place} class="chart" role="img" aria-label={`${chart.title} over time`} />
    </div>
  );
}

function valueText(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) ? String(value) : value.toFixed(3);
}

function options(chart: Chart, axis: Axis, height: number): uPlot.Options {
  const stepped = uPlot.paths.stepped!({ align: 1 });
  return {
    width: axis.width,
    height,
    padding: [4, 0, 4, 0],
    cursor: { show: false },
    legend: { show: false },
    scales: { x: { time: false, range: [axis.from, axis.to] }, y: { range: (_, low, high) => padded(low, high) } },
    axes: [{ show: false }, { show: false }],
    series: [
      {},
      ...chart.lines.map((_, i) => ({
        stroke: color(hue(i)),
        width: 1.2,
        points: { show: false },
        ...(chart.isStepped ? { paths: stepped } : {}),
        ...(i >= NUM_COLORS ? { dash: [4, 3] } : {}),
      })),
    ],
  };
}

function padded(low: number, high: number): [number, number] {
  const margin = high > low ? (high - low) * 0.05 : 1;
  return [low - margin, high + margin];
}
