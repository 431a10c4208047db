/** Exports and films that were asked for: how far they are, and where to get them. */

import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { ask, isConnected } from "../store";
import type { Task } from "../types";

const REFRESH_MS = 700;
export const tasks = signal<Task[]>([]);

export async function refreshTasks(): Promise<void> {
  if (isConnected.value) tasks.value = await ask<Task[]>("tasks").catch(() => tasks.value);
}

export function TaskList() {
  const isBusy = tasks.value.some(({ state }) => state === "waiting" || state === "running");
  useEffect(() => {
    if (!isBusy) return;
    const timer = setInterval(() => void refreshTasks(), REFRESH_MS);
    return () => clearInterval(timer);
  }, [isBusy]);
  if (tasks.value.length === 0) return null;
  return (
    <ul class="tasks" aria-label="Exports and films">
      {[...tasks.value].reverse().map((task) => (
        <li key={task.task_id} class={task.state}>
          <b>{task.title}</b>
          {task.state === "running" && task.num_total ? (
            <progress value={task.num_done} max={task.num_total} aria-label={`${task.num_done} of ${task.num_total}`} />
          ) : (
            <span>{task.state}</span>
          )}
          <span class="task-detail">{task.detail}</span>
          {task.can_download ? (
            <a href={`/tasks/${task.task_id}/file`} download>
              Download
            </a>
          ) : task.result ? (
            <code>{task.result}</code>
          ) : null}
        </li>
      ))}
    </ul>
  );
}
