"""The decoding loop on token ids: draft, score with the target, verify, learn.

Leviathan et al., https://arxiv.org/abs/2211.17192; Chen et al., https://arxiv.org/abs/2302.01318
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, MutableSequence
from time import perf_counter

from ggufspec.decoding.sampling import Rows, Sampling, to_probs, unusable
from ggufspec.decoding.types import Ask, Drafter, Round, Scored, Uniforms, Verify

Loop = Generator[Ask | Round, Scored | None, None]  # yields an Ask, takes a Scored, yields a Round


def speculate(
    tokens: MutableSequence[int],
    *,
    drafter: Drafter,
    verify: Verify,
    sampling: Sampling,
    uniforms: Callable[[int], Uniforms],
    n_draft: int,
    n_end: int,
    stop_tokens: Collection[int] = (),
) -> Loop:
    """Append tokens to `tokens`, one Round after another, until `n_end` tokens or a stop token.

    Yields an Ask before each Round; the caller answers it with `send(Scored(...))`, so it can put
    several texts into one pass. `uniforms(n)` returns n fresh uniforms; a round drafts at most
    `n_draft` tokens. With a lossless rule the tokens have exactly the target's distribution under
    `sampling`. A constraint may end the text without a stop token. The caller may stop after any
    round: there is nothing to clean up.
    """
    ends = frozenset(stop_tokens)
    if sampling.state is None:
        sampling = sampling.begun()
    constraint = sampling.constraint
    rows: Rows | None = None  # (n_draft + 1, n_vocab), reused every round
    while len(tokens) < n_end:
        start = perf_counter()
        # A round adds the accepted tokens and one more; a longer draft could not be used.
        draft = drafter.draft(tokens, min(n_draft, n_end - len(tokens) - 1))
        draft_seconds = perf_counter() - start
        answer = yield Ask(tokens, draft.tokens, draft.parents)
        assert answer is not None
        start = perf_counter()
        logits = answer.logits
        assert logits is not None
        if rows is None:
            rows = Rows(n_draft + 1, logits.shape[1])
        probs = to_probs(logits, sampling, tokens, draft.tokens, draft.parents, out=rows)
        verdict = verify(draft, probs, uniforms(len(logits)))
        drafter.observe(draft, probs, verdict)
        added = [*draft.accepted(verdict), verdict.next_token]
        stops = not ends.isdisjoint(added)
        if stops:
            del added[next(i for i, token in enumerate(added, 1) if token in ends) :]
            if constraint is not None and added[1:] and constraint.is_over([*tokens, *added[:-1]]):
                del added[-1]  # without a draft, the text would have ended before this token
        elif verdict.next_token < 0:
            if constraint is not None:
                constraint.masks([*tokens, *added[:-1]])  # may raise a more specific error
            raise unusable("no token is allowed after an accepted draft", sampling)
        probs.advance(sampling.native, verdict.nodes[: len(added) - 1], added[-1])
        tokens.extend(added)
        yield Round(
            added,
            n_drafted=len(draft.tokens),
            n_accepted=min(verdict.n_accepted, len(added)),
            draft_seconds=draft_seconds,
            target_seconds=answer.seconds,
            verify_seconds=perf_counter() - start,
            expected=draft.expected,
            why=draft.why,
            n_sharers=answer.n_sharers,
            drafted_tokens=tuple(draft.tokens) if draft.parents else (),
            parents=tuple(draft.parents),
            nodes=verdict.nodes,
        )
        if stops or (constraint is not None and constraint.is_over(tokens)):
            return
