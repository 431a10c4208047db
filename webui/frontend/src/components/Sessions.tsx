/** The engine's sessions by tier: as they are now, with what can be done with them, or as they were recorded. */

import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { ask, canAct, clock, edge, notice, run, shown, slowTime, tryTo } from "../store";
import { clockTime } from "../format";
import type { Ledger, SessionRow } from "../types";
import { confirmed } from "./dialogs";

const REFRESH_MS = 2000;

export function Sessions() {
  const rows = useSignal<SessionRow[] | null>(null);
  const problem = useSignal<string | null>(null);
  const selected = useSignal<string | null>(null);

  const isNow = clock.value.mode === "live";
  const moment = isNow ? null : Math.floor(slowTime.value * 2) / 2;

  const written = edge.value.isLive && !isNow ? shown.value?.revision : 0; // a run that goes on adds to its past

  const load = async () => {
    try {
      rows.value = await (moment === null ? ask<SessionRow[]>("sessions") : ask<SessionRow[]>("sessions_at", { t: moment }));
      problem.value = null;
    } catch (error) {
      problem.value = error instanceof Error ? error.message : String(error);
      rows.value = null;
    }
  };
  useEffect(() => {
    void load();
    if (!isNow) return;
    const timer = setInterval(() => void load(), REFRESH_MS);
    return () => clearInterval(timer);
  }, [run.value?.run, edge.value.isLive, moment, written]);

  if (problem.value) return <p class="empty">{problem.value}</p>;
  if (!rows.value) return <p class="empty">Asking the engine …</p>;
  const tiers = [
    ["in memory", rows.value.filter((one) => !one.is_parked)],
    ["parked", rows.value.filter((one) => one.is_parked)],
  ] as const;
  return (
    <div class="sessions" tabIndex={0} role="region" aria-label="Sessions">
      <p class="turn-note" role="status">
        {moment === null ? "now" : `as recorded at ${clockTime(moment)}${edge.value.isLive ? "; follow the run (L) to act" : ""}`}
      </p>
      {tiers.map(([tier, members]) => (
        <section key={tier}>
          <h3>
            {tier} <span class="count">{members.length}</span>
          </h3>
          <ul>
            {members.map((one) => (
              <SessionItem key={one.session_id} session={one} isNow={isNow} isOpen={selected.value === one.session_id} onOpen={() => (selected.value = selected.value === one.session_id ? null : one.session_id)} reload={load} />
            ))}
          </ul>
        </section>
      ))}
    </div>
  );
}

function SessionItem({
  session,
  isNow,
  isOpen,
  onOpen,
  reload,
}: {
  session: SessionRow;
  isNow: boolean;
  isOpen: boolean;
  onOpen(): void;
  reload(): Promise<void>;
}) {
  const act = async (type: string, fields: Record<string, unknown>, done: string) => {
    const result = await tryTo(ask(type, { session_id: session.session_id, ...fields }));
    if (result !== undefined) notice.value = done;
    await reload();
  };
  const used = session.num_window_tokens + session.num_recalled_tokens;
  return (
    <li class="session">
      <button type="button" class="session-head" aria-expanded={isOpen} onClick={onOpen}>
        <b>{session.session_id}</b>
        {session.is_busy ? <span class="chip running">busy</span> : null}
        <span class="session-fill" title={`${used} of ${session.window} tokens in the window`}>
          <i class="token reused" style={{ width: `${(100 * session.num_window_tokens) / session.window}%` }} />
          <i class="token recalled" style={{ width: `${(100 * session.num_recalled_tokens) / session.window}%` }} />
        </span>
        <span class="session-numbers">
          {session.num_turns} turns · {session.num_window_tokens}/{session.window} tokens
          {session.num_archived_tokens ? ` · ${session.num_archived_tokens} archived` : ""}
        </span>
      </button>
      {isOpen ? (
        <div class="session-acts">
          {!isNow ? (
            <p class="empty">
              {session.num_window_tokens} tokens in the window, {session.num_recalled_tokens} recalled, {session.num_archived_tokens} archived,{" "}
              {session.num_kv_blocks} KV blocks.
            </p>
          ) : canAct.value ? (
            <>
              <button type="button" disabled={session.is_parked} onClick={() => void act("park", {}, `${session.session_id} is parked`)}>
                Park
              </button>
              <button
                type="button"
                onClick={() => {
                  const new_id = `${session.session_id}-fork-${Date.now().toString(36)}`;
                  void act("fork", { new_id }, `copied as ${new_id}`);
                }}
              >
                Fork
              </button>
              <AskForm session={session} />
            </>
          ) : (
            <p class="empty">This page is read-only.</p>
          )}
        </div>
      ) : null}
    </li>
  );
}

function AskForm({ session }: { session: SessionRow }) {
  const text = useSignal("");
  const inSession = useSignal(false);
  const reply = useSignal<{ text: string; ledger: Ledger } | null>(null);
  const isAsking = useSignal(false);

  const send = async (event: Event) => {
    event.preventDefault();
    if (!text.value.trim()) return;
    if (inSession.value) {
      const isSure = await confirmed({
        title: "Ask in the robot's own session?",
        text: "The question and its answer become a turn of the session: the planner will remember it, and older turns may leave the window for it.",
        action: "Ask",
      });
      if (!isSure) return;
    }
    isAsking.value = true;
    const found = await tryTo(ask<{ text: string; ledger: Ledger }>("ask", { session_id: session.session_id, text: text.value, is_in_session: inSession.value }));
    isAsking.value = false;
    if (found) reply.value = found;
  };

  return (
    <form class="ask" onSubmit={(event) => void send(event)}>
      <label>
        Question
        <textarea rows={2} value={text.value} onInput={(event) => (text.value = event.currentTarget.value)} placeholder="Review of shift 1: list every step given up in shift 1." />
      </label>
      <label class="check">
        <input type="checkbox" checked={inSession.value} onChange={(event) => (inSession.value = event.currentTarget.checked)} />
        in the session itself (otherwise in a copy that is thrown away)
      </label>
      <button type="submit" class="primary" disabled={isAsking.value}>
        {isAsking.value ? "Asking …" : "Ask the planner"}
      </button>
      {reply.value ? (
        <p class="reply raw" role="status">
          {reply.value.text}{" "}
          <span class="ledger-text">
            {reply.value.ledger.computed} computed · {reply.value.ledger.reused + reply.value.ledger.restored} from the session
          </span>
        </p>
      ) : null}
    </form>
  );
}
