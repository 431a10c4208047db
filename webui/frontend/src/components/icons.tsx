/** Line icons on a 16-pixel grid; they take the colour of their text. */

const PATHS = {
  play: "M5 3.2v9.6l7.6-4.8z",
  pause: "M5 3.5v9M11 3.5v9",
  back: "M10.5 3.5 6 8l4.5 4.5M4 3.5v9",
  forward: "M5.5 3.5 10 8l-4.5 4.5M12 3.5v9",
  sun: "M8 5.2a2.8 2.8 0 1 0 0 5.6 2.8 2.8 0 0 0 0-5.6M8 1.4v1.4M8 13.2v1.4M1.4 8h1.4M13.2 8h1.4M3.3 3.3l1 1M11.7 11.7l1 1M12.7 3.3l-1 1M4.3 11.7l-1 1",
  moon: "M12.8 9.6A5.4 5.4 0 0 1 6.4 3.2a5.4 5.4 0 1 0 6.4 6.4z",
  plus: "M8 3v10M3 8h10",
  stop: "M4.5 4.5h7v7h-7z",
  close: "M4 4l8 8M12 4l-8 8",
  film: "M2.5 4h11v8h-11zM5 4v8M11 4v8",
  disk: "M8 2.5v7M5 7l3 3 3-3M3 12.5h10",
  more: "M4 8h.01M8 8h.01M12 8h.01",
  help: "M6 6.2a2 2 0 1 1 2.8 1.9c-.6.3-.8.7-.8 1.3M8 11.8v.01",
  fit: "M2.5 8h11M4.5 5.5 2 8l2.5 2.5M11.5 5.5 14 8l-2.5 2.5",
  chevron: "M4.5 6.5 8 10l3.5-3.5",
  speech: "M3 3.5h10v7H7l-3 2.5v-2.5H3z",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }) {
  const isFilled = name === "play" || name === "stop";
  return (
    <svg class="icon" viewBox="0 0 16 16" aria-hidden="true">
      <path
        d={PATHS[name]}
        fill={isFilled ? "currentColor" : "none"}
        stroke="currentColor"
        stroke-width={name === "more" ? 2.2 : 1.5}
        stroke-linecap="round"
        stroke-linejoin="round"
      />
    </svg>
  );
}
