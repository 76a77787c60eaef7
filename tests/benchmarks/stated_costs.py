"""Writes texts with a real pair, and counts the seconds that they would take at stated costs.

    python -m tests.benchmarks.stated_costs [TARGET DRAFT] [--prompts FILE] [--chat]

`auto` may draft trees, or chains only. It decides by the stated costs, and learns how often tokens
are accepted from text to text, as usual. The unit of speed is a token per pass over one token.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import exp, log

from ggufspec.drafting.cost_model import CostModel
from ggufspec.drafting.draft_length import LengthPolicy
from ggufspec.drafting.pair_profile import PairProfile
from ggufspec.engine.options import GenerateOptions
from tests.benchmarks.replay import COSTS as MEASURED
from tests.benchmarks.replay import N_MOST, Costs
from tests.benchmarks.tokens_per_pass import (
    loaded,
    mean_and_error,
    parser,
    prompts_of,
    store,
    written,
)

# Passes and draft steps in passes over one token, times 1000. Flat: a GPU with a large target.
COSTS = {
    "flat-0.05": Costs({1: 1000, 17: 1100}, 50, 5),
    "flat-0.1": Costs({1: 1000, 17: 1100}, 100, 10),
    "linear-0.1": Costs({1: 1000, 17: 2600}, 100, 25),
    **{name.replace(" ", "-"): MEASURED[name] for name in ("Q4_0 fast", "Q4_K_M")},
}
CONTENDERS: dict[str, GenerateOptions] = {"chains": {"tree": "off"}, "trees": {"tree": "auto"}}


class StatedCosts(CostModel):
    """Costs that measurements do not change; adds up what all passes and draft steps cost."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(N_MOST + 1)
        one = costs.curve[0]
        for n, seconds in enumerate(costs.curve, 1):
            super().observe_target(n, seconds / one)
        super().observe_target(1, 1.0)  # twice, or plain decoding would be measured first
        super().observe_draft(1, costs.step / 1000 / one)
        self._read_seconds = costs.read / 1000 / one
        self.seconds = 0.0

    @property
    def read(self) -> float:
        return self._read_seconds

    def observe_target(self, n_tokens: int, seconds: float) -> None:
        self.seconds += self.curve[n_tokens - 1]

    def observe_plain(self, seconds: float) -> None:
        pass

    def observe_draft(self, n_steps: int, seconds: float, n_further: int = 0) -> None:
        self.seconds += n_steps * self.step + n_further * self.read


class StatedProfile(PairProfile):
    """Keeps its costs, and what texts teach of acceptance, also where texts have seeds."""

    @property
    def is_settled(self) -> bool:
        return True  # nothing is measured

    def policy(
        self, temperature: float, *, repeats: bool, in_blocks: bool, has_model: bool = True
    ) -> LengthPolicy:
        return super().policy(temperature, repeats=False, in_blocks=in_blocks, has_model=has_model)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table: tokens per pass over one token, and their ratio with its standard error."""
    found = parser(__doc__, "stated_costs")
    found.add_argument("--costs", choices=list(COSTS), nargs="+", default=list(COSTS))
    options = found.parse_args(arguments)
    sys.stdout.write(
        f"{'costs':24}{'temperature':>11}"
        + "".join(f"{name:>9}{'drafted':>9}{'tokens':>8}" for name in CONTENDERS)
        + f"{'trees / chains':>18}\n"
    )
    with loaded(options, n_draft_max=N_MOST) as engine:
        prompts = prompts_of(engine, options)
        for name in options.costs:
            for temperature in options.temp:
                sys.stdout.write(f"{name:24}{temperature:>11.2f}")
                speeds: dict[str, list[float]] = {}
                for contender, how in CONTENDERS.items():
                    costs = StatedCosts(COSTS[name])
                    engine.pair.profile = StatedProfile(costs)
                    settings: GenerateOptions = {
                        **how,
                        "n_draft": "auto",
                        "temperature": temperature,
                        "max_tokens": options.tokens,
                    }
                    speeds[contender] = []
                    n_rounds = n_drafted = n_tokens = 0
                    for run in range(options.runs):
                        before = costs.seconds
                        stats = written(engine, prompts, run, settings)
                        speeds[contender].append(stats.n_generated / (costs.seconds - before))
                        n_rounds += stats.n_rounds
                        n_drafted += stats.n_drafted
                        n_tokens += stats.n_generated
                    shares = n_drafted / n_rounds, n_tokens / n_rounds
                    speed = n_tokens / costs.seconds
                    sys.stdout.write(f"{speed:>9.2f}{shares[0]:>9.1f}{shares[1]:>8.2f}")
                    sys.stdout.flush()
                    row = {"costs": name, "temperature": temperature, "contender": contender}
                    store(
                        options,
                        row
                        | {"passes": COSTS[name].passes, "step": COSTS[name].step}
                        | {"drafted": shares[0], "tokens_per_pass": shares[1]}
                        | {"speed": speed, "speeds": speeds[contender]},
                    )
                pairs = zip(speeds["trees"], speeds["chains"], strict=True)
                mean, error = mean_and_error([log(ours / others) for ours, others in pairs])
                sys.stdout.write(f"{f'{exp(mean):.3f} +- {error:.3f}':>18}\n")


if __name__ == "__main__":
    main()
