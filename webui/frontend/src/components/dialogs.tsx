/** Dialogs: the question before something is lost, and the frame that the others use. */

import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { Icon } from "./icons";

interface Confirmation {
  readonly title: string;
  readonly text: string;
  readonly action: string;
}

const asked = signal<(Confirmation & { answer(isSure: boolean): void }) | null>(null);

/** Whether the user is sure. */
export function confirmed(confirmation: Confirmation): Promise<boolean> {
  return new Promise((resolve) => {
    asked.value = {
      ...confirmation,
      answer: (isSure) => {
        asked.value = null;
        resolve(isSure);
      },
    };
  });
}

export function ConfirmDialog() {
  const question = asked.value;
  if (!question) return null;
  return (
    <Dialog title={question.title} onClose={() => question.answer(false)} isSmall>
      <p>{question.text}</p>
      <footer>
        <button type="button" onClick={() => question.answer(false)}>
          Cancel
        </button>
        <button type="button" class="danger" onClick={() => question.answer(true)}>
          {question.action}
        </button>
      </footer>
    </Dialog>
  );
}

export function Dialog({
  title,
  onClose,
  isSmall = false,
  children,
}: {
  title: string;
  onClose(): void;
  isSmall?: boolean;
  children: preact.ComponentChildren;
}) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog
      ref={dialog}
      class={isSmall ? "small" : ""}
      aria-label={title}
      onCancel={(event) => {
        event.preventDefault();
        onClose();
      }}
      onClick={(event) => {
        if (event.target === dialog.current) onClose(); // the backdrop
      }}
    >
      <div class="dialog-body">
        <header>
          <h2>{title}</h2>
          <button type="button" class="icon-button" aria-label="Close" onClick={onClose}>
            <Icon name="close" />
          </button>
        </header>
        {children}
      </div>
    </dialog>
  );
}

/** What each key does. */
export function KeyHelp({ keys, onClose }: { keys: readonly (readonly [string, string])[]; onClose(): void }) {
  return (
    <Dialog title="Keyboard" onClose={onClose} isSmall>
      <dl class="keys">
        {keys.map(([key, about]) => (
          <div key={key}>
            <dt>
              <kbd>{key}</kbd>
            </dt>
            <dd>{about}</dd>
          </div>
        ))}
      </dl>
    </Dialog>
  );
}
