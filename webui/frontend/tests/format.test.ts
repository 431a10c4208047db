import { describe, expect, it } from "vitest";
import { axisTime, clockTime, readCommand, spans } from "../src/format";
import { readPicture } from "../src/connection";
import { ticks, toPixel, toTime } from "../src/timeAxis";

describe("times", () => {
  it("never shows a second that has not come", () => {
    expect(clockTime(59.99)).toBe("0:00:59.9");
    expect(clockTime(3725.5)).toBe("1:02:05.5");
    expect(clockTime(61, 0)).toBe("0:01:01");
  });
  it("are short on the axis", () => {
    expect([0.5, 30, 90, 3600].map((t) => axisTime(t))).toEqual(["0.5 s", "30 s", "1:30", "1:00:00"]);
    expect([461, 461.2].map((t) => axisTime(t, true))).toEqual(["7:41.0", "7:41.2"]);
  });
  it("turn into pixels and back", () => {
    const axis = { from: 10, to: 20, width: 500 };
    expect(toPixel(axis, 15)).toBe(250);
    expect(toTime(axis, toPixel(axis, 17.3))).toBeCloseTo(17.3);
    const found = ticks(axis, 80);
    expect(found).toEqual([10, 12, 14, 16, 18, 20]);
  });
});

describe("the planner's replies", () => {
  it("are put into words", () => {
    expect(readCommand('{"action":"execute","task":"turn on the stove"}')).toEqual({ verb: "execute", text: "turn on the stove" });
    expect(readCommand('{"redo":[{"job":1,"step":2,"task":"open it"}]}')).toEqual({ verb: "redo", text: "1.2 open it" });
    expect(readCommand('{"redo":[]}')?.text).toBe("nothing");
    expect(readCommand('{"action":"give_up","shift":1,"job":2,"step":3,"task":"x"}')?.verb).toBe("give up");
  });
  it("stay as they are when they are no commands", () => {
    expect(readCommand("Sure, I will")).toBeNull();
    expect(readCommand("null")).toBeNull();
    expect(readCommand('{"action":"dance"}')).toBeNull();
  });
});

it("neighbours are written as spans", () => {
  expect(spans([1, 2, 3, 7, null, 9, 10])).toBe("#1–#3, #7, #9–#10");
});

it("a picture's header is read as the server writes it", () => {
  const data = new ArrayBuffer(19);
  const view = new DataView(data);
  view.setUint8(0, 1);
  view.setUint8(1, 1);
  view.setUint16(2, 300, true);
  view.setUint32(4, 70_000, true);
  view.setFloat64(8, 12.25, true);
  const picture = readPicture(data);
  expect(picture).toMatchObject({ camera: "wrist", robot: 300, seek: 70_000, t: 12.25 });
  expect(picture.jpeg.size).toBe(3);
});
