/** Tokens per second, batch size, sessions, GPU and CPU: minimum to maximum per pixel, with uPlot. */

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { compact } from "../format";
import { hover, series, slowTime } from "../store";
import { color, theme } from "../theme";
import type { Axis } from "../timeAxis";
import type { SeriesWindow } from "../types";
import { useWindow } from "../useWindow";

interface Chart {
  readonly title: string;
  readonly unit: string;
  readonly series: readonly { name: string; label: string; color: string }[];
}

const CHARTS: readonly Chart[] = [
  {
    title: "tokens",
    unit: "/s",
    series: [
      { name: "computed_tokens_per_s", label: "computed", color: "token-computed" },
      { name: "generated_tokens_per_s", label: "generated", color: "token-generated" },
      { name: "recalled_tokens_per_s", label: "recalled", color: "token-recalled" },
      { name: "restored_tokens_per_s", label: "restored", color: "token-restored" },
    ],
  },
  {
    title: "batch",
    unit: "",
    series: [
      { name: "batch_size", label: "running", color: "part-decode" },
      { name: "waiting", label: "waiting", color: "part-waiting" },
    ],
  },
  {
    title: "sessions",
    unit: "",
    series: [
      { name: "sessions", label: "all", color: "series-1" },
      { name: "sessions_parked", label: "parked", color: "series-2" },
    ],
  },
  { title: "KV cache", unit: " %", series: [{ name: "kv_used_percent", label: "used", color: "series-1" }] },
  { title: "GPU", unit: " %", series: [{ name: "gpu_percent", label: "load", color: "series-1" }] },
  { title: "GPU memory", unit: " GiB", series: [{ name: "gpu_memory_gib", label: "used", color: "series-2" }] },
  { title: "GPU power", unit: " W", series: [{ name: "gpu_power_w", label: "draw", color: "series-3" }] },
  { title: "CPU", unit: " %", series: [{ name: "cpu_percent", label: "load", color: "series-1" }] },
  { title: "memory", unit: " GiB", series: [{ name: "memory_gib", label: "used", color: "series-2" }] },
];

export function SeriesCharts({ axis }: { axis: Axis }) {
  const known = new Set(series.value);
  const charts = CHARTS.map((chart) => ({ ...chart, series: chart.series.filter(({ name }) => known.has(name)) }));
  const names = charts.flatMap((chart) => chart.series.map(({ name }) => name));
  const data = useWindow<Record<string, SeriesWindow>>("series", { names }, axis.width).value;
  if (names.length === 0) return <p class="empty in-timeline">Engine and machine were not recorded in this run.</p>;
  return (
    <>
      {charts
        .filter((chart) => chart.series.length > 0)
        .map((chart) => (
          <SeriesChart key={chart.title} chart={chart} axis={axis} data={data ?? {}} />
        ))}
    </>
  );
}

const HEIGHT = 46;

function SeriesChart({ chart, axis, data }: { chart: Chart; axis: Axis; data: Record<string, SeriesWindow> }) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const scheme = theme.value;

  useEffect(() => {
    if (!place.current) return;
    plot.current = new uPlot(options(chart, axis.width), [[]], place.current);
    return () => plot.current?.destroy();
  }, [chart.series.length, scheme]);
  useEffect(() => plot.current?.setSize({ width: axis.width, height: HEIGHT }), [axis.width]);
  useEffect(() => {
    plot.current?.batch(() => {
      plot.current?.setData(columns(chart, data), false);
      plot.current?.setScale("x", { min: axis.from, max: axis.to });
    });
  }, [data, axis.from, axis.to, scheme]);

  const t = hover.value ?? slowTime.value;
  return (
    <div class="lane-group">
      <div class="gutter">
        <span class="gutter-title">{chart.title}</span>
        {chart.series.map(({ name, label, color: hue }) => (
          <span key={name} class="series-value">
            <i style={{ background: `var(--${hue})` }} />
            {label} <b>{valueAt(data[name], t, chart.unit)}</b>
          </span>
        ))}
      </div>
      <div ref={place} class="chart" role="img" aria-label={`${chart.title} over time`} />
    </div>
  );
}

/** All series of a chart on the times of the first: they are sampled together. */
function columns(chart: Chart, data: Record<string, SeriesWindow>): uPlot.AlignedData {
  const times = new Set<number>();
  for (const { name } of chart.series) for (const t of data[name]?.[0] ?? []) times.add(t);
  const x = [...times].sort((a, b) => a - b);
  const place = new Map(x.map((t, i) => [t, i]));
  const rows: (number | null)[][] = [];
  for (const { name } of chart.series) {
    const [t, low, high] = data[name] ?? [[], [], []];
    const lows: (number | null)[] = new Array(x.length).fill(null);
    const highs: (number | null)[] = new Array(x.length).fill(null);
    t.forEach((one, i) => {
      const at = place.get(one) as number;
      lows[at] = low[i] ?? null;
      highs[at] = high[i] ?? null;
    });
    rows.push(highs, lows);
  }
  return [x, ...rows] as uPlot.AlignedData;
}

function valueAt(series: SeriesWindow | undefined, t: number, unit: string): string {
  if (!series) return "–";
  const [times, , high] = series;
  let low = 0;
  let end = times.length;
  while (low < end) {
    const middle = (low + end) >> 1;
    if ((times[middle] as number) <= t) low = middle + 1;
    else end = middle;
  }
  const value = high[low - 1];
  return value === undefined ? "–" : `${compact(value)}${unit}`;
}

function options(chart: Chart, width: number): uPlot.Options {
  const series: uPlot.Series[] = [{}];
  const paths = uPlot.paths.stepped!({ align: -1 }); // a rate is that of the time before it
  const bands: uPlot.Band[] = [];
  for (const one of chart.series) {
    const stroke = color(one.color);
    series.push({ stroke, width: 1.2, points: { show: false }, spanGaps: true, paths });
    series.push({ stroke, width: 0.6, points: { show: false }, spanGaps: true, paths });
    bands.push({ series: [series.length - 2, series.length - 1], fill: `${stroke}33` });
  }
  return {
    width,
    height: HEIGHT,
    padding: [4, 0, 2, 0],
    cursor: { show: false },
    legend: { show: false },
    scales: { x: { time: false }, y: { range: (_, __, max) => [0, Math.max(max * 1.05, 1)] } },
    axes: [{ show: false }, { show: false }],
    series,
    bands,
  };
}
