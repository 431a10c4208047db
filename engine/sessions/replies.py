"""The reply of a turn: how it ends in the context, what is recorded of it, and how it is given again."""

from __future__ import annotations

from dayshift.engine.api import FinishReason, GenerateChunk, TokenLedger
from dayshift.engine.sequence import Sequence
from dayshift.engine.sessions.layout import CallPlan
from dayshift.engine.sessions.records import ReplyRecord, TurnRecord
from dayshift.engine.tokenizer import Tokenizer


def end_reply(tokenizer: Tokenizer, token_ids: list[int], output_ids: list[int]) -> None:
    """Complete a reply at the end of `token_ids` as the template would; one cut short is ended like a
    whole one."""
    end = tokenizer.reply_end_token_ids
    if output_ids and output_ids[-1] == end[0]:
        token_ids.extend(end[1:])
    elif output_ids and output_ids[-1] in tokenizer.eos_token_ids:
        token_ids[-1:] = end
    else:
        token_ids.extend(end)


def note_turns(sequence: Sequence, plan: CallPlan) -> None:
    """What the reply will say of the turns that its call asked for."""
    sequence.recalled_turns = plan.recalled
    sequence.kept_turns = plan.kept
    sequence.present_turns = plan.present
    sequence.not_fitting_turns = plan.not_fitting


def reply_record(sequence: Sequence, reason: FinishReason) -> ReplyRecord:
    """What a turn's record says of the call that it answers."""
    return ReplyRecord(
        request_id=sequence.request_id,
        token_ids=tuple(sequence.output_ids),
        finish_reason=reason,
        num_prompt_tokens=sequence.num_prompt_tokens,
        recalled_turns=sequence.recalled_turns,
        kept_turns=sequence.kept_turns,
        present_turns=sequence.present_turns,
        not_fitting_turns=sequence.not_fitting_turns,
    )


def repeated_reply(turn: TurnRecord, reply: ReplyRecord) -> GenerateChunk:
    """A recorded reply, in one chunk."""
    return GenerateChunk(
        request_id=reply.request_id,
        text=turn.messages[-1].content,
        token_ids=reply.token_ids,
        finish_reason=reply.finish_reason,
        ledger=TokenLedger(),
        num_prompt_tokens=reply.num_prompt_tokens,
        recalled_turns=reply.recalled_turns,
        kept_turns=reply.kept_turns,
        present_turns=reply.present_turns,
        not_fitting_turns=reply.not_fitting_turns,
        is_repeated=True,
    )
