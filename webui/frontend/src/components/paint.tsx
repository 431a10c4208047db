/** A canvas as wide as the time axis, sharp on every screen, drawn again when what it shows changes. */

import { useEffect, useRef } from "preact/hooks";
import { theme } from "../theme";

export function Paint({
  width,
  height,
  label,
  draw,
}: {
  width: number;
  height: number;
  label: string;
  draw(pen: CanvasRenderingContext2D): void;
}) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const scheme = theme.value;
  useEffect(() => {
    const target = canvas.current;
    const pen = target?.getContext("2d");
    if (!target || !pen) return;
    const ratio = window.devicePixelRatio || 1;
    if (target.width !== width * ratio || target.height !== height * ratio) {
      target.width = width * ratio;
      target.height = height * ratio;
    }
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    draw(pen);
  }, [width, height, draw, scheme]);
  return <canvas ref={canvas} style={{ width: `${width}px`, height: `${height}px` }} role="img" aria-label={label} />;
}
