/** The planner's exchange with the selected robot: words, token ledger, recalled turns marked. */

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { clockTime, milliseconds, readCommand, spans } from "../format";
import { ask, boards, focusedExchange, hasShown, run, selectedRobot, showExchange, slowTime, tryTo } from "../store";
import type { Exchange, Talk as TalkChunk } from "../types";

const COUNT = 60;

export function Talk() {
  const chunk = useSignal<TalkChunk | null>(null);
  const asked = useRef("");
  const list = useRef<HTMLOListElement>(null);
  const robot = selectedRobot.value;
  const t = slowTime.value;

  const revision = boards.value[robot]?.revision ?? 0;
  const mayAsk = robot !== "" && hasShown.value; // read here, so that the effect runs again when it changes
  const needed = neededChunk(chunk.value, t) || asked.current.split("|")[0] !== `${run.value?.run}/${robot}/${revision}`;
  useEffect(() => {
    const key = `${run.value?.run}/${robot}/${revision}|${Math.floor(t)}`;
    if (!needed || !mayAsk || asked.current === key) return;
    asked.current = key;
    void tryTo(ask<TalkChunk>("talk", { robot, t, count: COUNT })).then((found) => {
      if (found && asked.current === key) chunk.value = found;
    });
  });

  const said = (chunk.value?.exchanges ?? []).filter((one) => one.at <= t);
  const current = said.at(-1);
  const asking = focusedExchange.value === null ? current : said.find((one) => one.idx === focusedExchange.value);
  const marked = new Set(asking?.recalled ?? []);
  useEffect(() => {
    const element = list.current;
    if (!element) return;
    const target = focusedExchange.value === null ? element.lastElementChild : element.querySelector(`[data-idx="${focusedExchange.value}"]`);
    if (focusedExchange.value === null) element.scrollTop = element.scrollHeight;
    else target?.scrollIntoView({ block: "nearest" });
  }, [current?.idx, focusedExchange.value, robot, chunk.value]);

  return (
    <div class="talk">
      {chunk.value && said.length === 0 ? <p class="empty">The planner of {robot || "this robot"} has not been asked yet.</p> : null}
      <ol ref={list} aria-label={`Planner of ${robot}`} tabIndex={0}>
        {said.map((one) => (
          <ExchangeItem key={one.idx} exchange={one} t={t} isRecalled={marked.has(one.idx)} robot={robot} />
        ))}
      </ol>
    </div>
  );
}

function neededChunk(chunk: TalkChunk | null, t: number): boolean {
  if (!chunk) return true;
  const first = chunk.exchanges[0];
  const last = chunk.exchanges.at(-1);
  return (chunk.has_earlier && first !== undefined && t < first.at + 1) || (chunk.has_later && last !== undefined && t >= last.at);
}

export function ExchangeItem({
  exchange,
  t,
  isRecalled,
  robot,
}: {
  exchange: Exchange;
  t: number;
  isRecalled: boolean;
  robot: string;
}) {
  const isAnswered = exchange.at + exchange.latency_s <= t + 1e-6;
  const isFocused = focusedExchange.value === exchange.idx;
  const classes = ["exchange", isRecalled ? "is-recalled" : "", isFocused ? "is-focused" : "", exchange.is_review ? "is-review" : ""];
  return (
    <li class={classes.join(" ")} data-idx={exchange.idx}>
      <button type="button" class="exchange-time" title="go to this moment" onClick={() => showExchange(robot, exchange, exchange.at + exchange.latency_s)}>
        {clockTime(exchange.at, 0)}
        <span>#{exchange.idx}</span>
      </button>
      <div class="exchange-body">
        <p class="message">{exchange.message}</p>
        {isAnswered ? <Answer exchange={exchange} robot={robot} /> : <p class="reply waiting">thinking …</p>}
      </div>
    </li>
  );
}

function Answer({ exchange, robot }: { exchange: Exchange; robot: string }) {
  const command = readCommand(exchange.reply);
  return (
    <>
      {exchange.error ? (
        <p class="reply problem">no reply: {exchange.error}</p>
      ) : command ? (
        <p class="reply" title={exchange.reply}>
          <Words reply={exchange.reply} />
        </p>
      ) : (
        <p class="reply raw">{exchange.reply}</p>
      )}
      {exchange.problem ? <p class="reply problem">refused: {exchange.problem}</p> : null}
      <LedgerBar exchange={exchange} />
      <Recalled exchange={exchange} robot={robot} />
    </>
  );
}

const SOURCES = ["computed", "recomputed", "reused", "restored", "recalled", "generated"] as const;

export function LedgerBar({ exchange }: { exchange: Exchange }) {
  const parts = SOURCES.map((name) => [name, exchange.ledger[name] ?? 0] as const).filter(([, count]) => count > 0);
  const total = parts.reduce((sum, [, count]) => sum + count, 0);
  if (total === 0) return <p class="ledger-text">{milliseconds(exchange.latency_s)}</p>;
  const words = parts.map(([name, count]) => `${count} ${name}`).join(" · ");
  return (
    <div class="ledger" role="img" aria-label={`Tokens: ${words}; ${milliseconds(exchange.latency_s)}`}>
      <div class="ledger-bar">
        {parts.map(([name, count]) => (
          <i key={name} class={`token ${name}`} style={{ flexGrow: count }} title={`${count} tokens ${name}`} />
        ))}
      </div>
      <p class="ledger-text">
        {parts.map(([name, count]) => (
          <span key={name} class={`token-count ${name}`}>
            {count} {name}
          </span>
        ))}
        <span>{milliseconds(exchange.latency_s)}</span>
      </p>
    </div>
  );
}

/** What became of the turns that the question asked for; the recalled ones can be read in place. */
function Recalled({ exchange, robot }: { exchange: Exchange; robot: string }) {
  const turns = useSignal<Exchange[] | null>(null);
  const { recalled, present, not_fitting: left } = exchange;
  if (recalled.length + present.length + left.length === 0) return null;
  const indices = recalled.filter((turn) => turn !== null);
  const load = async () => {
    turns.value ??= (await tryTo(ask<Exchange[]>("turns", { robot, indices }))) ?? null;
  };
  return (
    <>
      {recalled.length ? (
        <details class="recalled-turns" onToggle={() => void load()}>
          <summary>
            recalled {recalled.length} {recalled.length === 1 ? "turn" : "turns"}: {spans(indices)}
          </summary>
          <ol>
            {(turns.value ?? []).map((turn) => (
              <li key={turn.idx}>
                <button type="button" class="exchange-time" title="go to this moment" onClick={() => showExchange(robot, turn, turn.at + turn.latency_s)}>
                  {clockTime(turn.at, 0)}
                </button>
                <span>
                  {turn.message} <Words reply={turn.reply} />
                </span>
              </li>
            ))}
          </ol>
        </details>
      ) : null}
      {present.length ? <p class="turn-note">still in the window: {spans(present)}</p> : null}
      {left.length ? <p class="turn-note">did not fit: {spans(left)}</p> : null}
    </>
  );
}

function Words({ reply }: { reply: string }) {
  const command = readCommand(reply);
  if (!command) return <span class="raw">{reply}</span>;
  return (
    <>
      <span class={`verb ${command.verb.replace(" ", "-")}`}>{command.verb}</span> {command.text}
    </>
  );
}
