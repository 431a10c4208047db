/** Light or dark: as the system says until the user chooses. */

import { signal } from "@preact/signals";

export type Theme = "light" | "dark";
const KEY = "dayshift-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

function stored(): Theme | null {
  const value = localStorage.getItem(KEY);
  return value === "light" || value === "dark" ? value : null;
}

export const theme = signal<Theme>(stored() ?? (dark.matches ? "dark" : "light"));

dark.addEventListener("change", () => {
  if (!stored()) theme.value = dark.matches ? "dark" : "light";
});

theme.subscribe((value) => {
  document.documentElement.dataset["theme"] = value;
});

export function toggleTheme(): void {
  theme.value = theme.value === "dark" ? "light" : "dark";
  localStorage.setItem(KEY, theme.value);
}

/** A colour of the style sheet, for drawing. */
export function color(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
