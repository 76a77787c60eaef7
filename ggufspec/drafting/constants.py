"""Every tuned number of drafting, with its meaning, its unit and the evidence for its value.

Evidence: [measured] on real models; [simulated: A, B] by `python -m tests.benchmarks.constants`,
which replays recorded texts: they take A times as long with half the value, B times with twice the
value; [insensitive]: both within 1 %; [derived] from another fact; [limit]: bound of sensible
values; [judgement]: not measured. Other modules of this room contain no such numbers
(tests/drafting/test_constants.py); numbers in native/ have their evidence beside them.
"""

from __future__ import annotations

from typing import Final

# Acceptance model of a new pair: probability of acceptance by logit gap (native/draft_length.h)
# [measured: Qwen2.5-Coder 1.5B and 0.5B, recorded texts of six kinds; similar for all kinds].
GREEDY: Final = (-0.3, 1.2)  # log-odds, and log-odds per logit
SAMPLED: Final = (0.2, 0.7)
PRIOR_WEIGHT: Final = 12.0  # observations that the prior counts as [insensitive]
# The draft model's second choice after a rejected first one, by the gap of remaining tokens
# [measured: Qwen2.5-Coder 1.5B and 0.5B, 165 rejections in 8 greedy texts: 32 % accepted below a
# gap of 0.3, 94 % above 3; at 0.8, 197: 27 and 75 %; embedded pair, 0.7 and 1: 33 and 66 to 80 %].
SECOND_GREEDY: Final = (-0.6, 0.7)
SECOND_SAMPLED: Final = (-0.8, 0.25)
# Acceptance of each further choice, relative to the rejected choice before it
# [measured: third choices, greedy, 0.27 after 0.46 (Qwen pair), 0.35 after 0.53 (embedded pair)].
FURTHER_CHOICE: Final = 0.6
MAX_COEFFICIENT: Final = 100  # of a stored model; a larger one means a damaged file [limit]

# Block verification accepts more tokens than their single probabilities predict. [measured:
# embedded pair, 0.12, 0.20, 0.32 and 0.41 more tokens in rounds of 3, 4, 5 and 6 at temperature 1;
# 0.15 and 0.27 in rounds of 3 and 5 at 0.7]
BLOCK_BONUS: Final = 0.07  # added share of a token's probability, per token before it

# How predictable the text is at present is measured by the target's latest logit gaps.
N_GAPS: Final = 12  # number of gaps that are kept [insensitive: 12 to 32]
PRIOR_GAPS: Final = (0.1, 0.4, 0.8, 1.3, 2.0, 3.0, 4.5, 7.0)  # logits, of a new text [judgement]
# Drafting starts again if its saving, over at least this number of tokens, pays for reading the
# tokens that the draft model has not read [insensitive].
READING_HORIZON: Final = 5
# The draft model reads a prompt once that is expected to pay for the rest of a text of this many
# tokens [judgement].
USUAL_LENGTH: Final = 256
# The balance of a pair (native/cost_model.h), in plain passes. A new pair, and each text with a
# seed, starts with START_BALANCE [recorded texts with seeds: 0.64 and 2 equal within 0.2 %; with 2,
# an uncertain draft is evaluated too long].
START_BALANCE: Final = 1.28
# More than most texts can lose before the policy stops drafting [recorded texts: 4 to 30 equal
# within 0.2 %; the slowest text of 64 tokens is at 0.96 of plain decoding with 4, at 0.92 with 8].
MAX_BALANCE: Final = 4.0
# Share of the generated tokens that a losing pair may spend on drafts [limit: below the promised
# 0.03, since the last draft can exceed it].
INVESTED_SHARE: Final = 0.02
# Largest expected loss of drafts without a balance, as a share of their expected gain [recorded
# texts: 0.3 and 1 equal; embedded pair at 0.8: a lower share skips good drafts; at 1, a pair that
# loses goes on drafting].
SMALL_RISK: Final = 0.6

N_PLAIN: Final = 2  # single-token passes measured before drafting is compared with them [judgement]

# Forced text: a constraint allows nothing else (forced_text.py). If the target has just written it
# with other tokens, it often does so again.
FORCED_ACCEPTANCE: Final = 0.95  # prior for a token
FORCED_ACCEPTANCE_AFTER_REJECTION: Final = 0.5  # prior for the next token after a rejected one
FORCED_PRIOR_WEIGHT: Final = 4.0  # observations that these priors count as [judgement]
FORCED_MEMORY: Final = 16.0  # observations until one has lost most of its weight [judgement]

# Advice that drafting does not help needs this many rounds that skip drafting [judgement].
N_ADVICE: Final = 32
ADVICE_SHARE: Final = 0.8  # and at least this share of all rounds [judgement]
ADVICE_SIZES: Final = (2, 4)  # tokens of passes whose costs it tells

# Costs of passes (cost_model.py).
N_FIRST_MEASUREMENTS: Final = 3  # per size; the fastest of them counts, as first passes are slow
COST_LEARNING_RATE: Final = 0.12  # of the moving average of later measurements [insensitive]
# A pass slower than this times the known cost was disturbed, and counts as this much [simulated:
# 1.04, 1.00].
OUTLIER: Final = 1.7
# Depths of texts below 2 ** this are one; from there on each doubling has costs of its own, since
# attention costs more per row of a pass the deeper the text is [judgement].
SHALLOW_BITS: Final = 10
# Cost of a further token in a batch, in single-token passes [simulated: 1.01, 1.07].
UNMEASURED_SLOPE: Final = 0.3
# Least distance, in tokens, between two sizes that a device computes equally fast [limit].
LEAST_DISTANCE: Final = 0.01
UNMEASURED_STEP: Final = 0.08  # a draft step, in target passes [insensitive]
UNMEASURED_READ: Final = 0.25  # a token that the draft model reads in a batch, in steps [judgement]
# A pass of a head that reads at most this many tokens before its block is learned as a step, not as
# reading. A head that rarely drafts has some to read each time: before this limit, the step of a
# DFlash head was estimated at 0.5 ms instead of 2.7 for 20 texts [measured].
FEW_BESIDE_BLOCK: Final = 32
# Old measurements are discounted so that a size is tried again; the more often a size was measured,
# the slower [simulated at measured costs: tries went from one round in 25 to one in 100].
N_FRESH_PASSES: Final = 32  # passes over other sizes before discounting begins
DISCOUNT_PER_PASS: Final = 0.0005
MIN_DISCOUNT: Final = 0.88
MIN_SECONDS: Final = 1e-9  # of a stored pass [limit]
MAX_SECONDS: Final = 1e6
# A stored pass over n tokens takes at least a pass over one token divided by this, and at most n of
# them times this. Else the file is damaged, or its measurement was disturbed, and is made again
# [limit].
MAX_DEVIATION: Final = 4.0
MAX_SIZE_DIGITS: Final = 5  # of a stored number of tokens [limit]
MAX_STORED_SIZE: Final = 10**5  # tokens; larger than any stored size [derived]
N_PASSES_TO_REMEMBER: Final = 8  # new passes after which costs are stored again [judgement]

# n-grams (native/ngrams.h), by shortest match length: acceptance if all votes agree, and if not;
# then the same two for matches in other texts [measured: close to the acceptance in the recorded
# texts; lower for other texts: with equal values, more texts of mixed kinds get slower].
NGRAM_PRIORS: Final = (
    (1, 0.35, 0.15, 0.02, 0.02),
    (2, 0.50, 0.15, 0.10, 0.05),
    (3, 0.65, 0.15, 0.20, 0.08),
    (4, 0.74, 0.18, 0.30, 0.10),
    (6, 0.82, 0.20, 0.45, 0.15),
    (9, 0.92, 0.25, 0.55, 0.20),
    (16, 0.98, 0.35, 0.85, 0.35),
)
NGRAM_MATCHED: Final = 32  # tokens of a match that native/ngrams.h compares [derived]
NGRAM_PRIOR_WEIGHT: Final = 6.0  # observations that a prior counts as [judgement]
