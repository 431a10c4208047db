import { defineConfig } from "vite";

export default defineConfig({
  base: "/",
  build: {
    outDir: "../static",
    emptyOutDir: true,
    assetsInlineLimit: 0, // the page's security policy allows no data: scripts or styles
    target: "es2022",
    modulePreload: { polyfill: false },
    rolldownOptions: { input: ["index.html", "dataset.html"] },
  },
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  server: { proxy: { "/socket": { target: "ws://127.0.0.1:8080", ws: true } } },
});
