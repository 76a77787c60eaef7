"""The order of prompts, and their retries."""

from __future__ import annotations

from ggufspec.batch.run import PromptQueue


def test_prompts_are_taken_in_order_until_all_are_finished() -> None:
    queue = PromptQueue([3, 5], n_retries=0)
    assert [queue.take(), queue.take()] == [(3, 1), (5, 1)]
    assert len(queue) == 0
    queue.finish(5)
    assert not queue.is_finished
    queue.finish(3)
    assert queue.is_finished


def test_a_prompt_to_retry_is_the_next_until_its_attempts_are_used_up() -> None:
    queue = PromptQueue([0, 1], n_retries=2)
    queue.take()
    assert queue.retry(0)
    assert queue.take() == (0, 2)
    assert queue.retry(0)
    assert queue.take() == (0, 3)
    assert not queue.retry(0)
    queue.finish(0)
    assert queue.take() == (1, 1)


def test_without_retries_the_first_attempt_is_the_last() -> None:
    queue = PromptQueue([0], n_retries=0)
    queue.take()
    assert not queue.retry(0)
