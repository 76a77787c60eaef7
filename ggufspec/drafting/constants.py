"""Every tuned number of drafting, with its meaning, its unit and the evidence for its value.

Evidence: [measured] on real models; [simulated: A, B] by `python -m tests.benchmarks.constants`,
which replays recorded texts: they take A times as long with half of the value, B times with twice;
[insensitive]: both within 1 %; [derived]; [limit] of what is sensible; [judgement]: not measured.
Other modules of this room contain no such numbers (tests/drafting/test_constants.py); those of
native/ have their evidence beside them.
"""

from __future__ import annotations

from typing import Final

# The acceptance model: probability of a token by a logit gap (native/draft_length.h), of a new pair
# [measured: Qwen2.5-Coder 1.5B and 0.5B, recorded texts of six kinds: hardly different by kind].
GREEDY_INTERCEPT: Final = -0.3  # log-odds
GREEDY_SLOPE: Final = 1.2  # log-odds per logit
SAMPLED_INTERCEPT: Final = 0.2
SAMPLED_SLOPE: Final = 0.7
PRIOR_WEIGHT: Final = 12.0  # observations that the prior counts as [insensitive]
GREEDY_MEMORY: Final = 100.0  # observations until one has lost most of its weight [insensitive]
# Longer, as the acceptance of sampled drafts depends less on the text [simulated: 1.02, 1.00].
SAMPLED_MEMORY: Final = 300.0
# The draft model's next choice where its first was rejected, by the gap of what is left [measured:
# Qwen2.5-Coder 1.5B and 0.5B, 165 rejections of 8 greedy texts: 32 % accepted below a gap of 0.3,
# 94 % above 3; at 0.8, 197 of them: 27 and 75 %; embedded pair at 0.7 and 1: 33 and 66 to 80 %].
SECOND_GREEDY_INTERCEPT: Final = -0.6
SECOND_GREEDY_SLOPE: Final = 0.7
SECOND_SAMPLED_INTERCEPT: Final = -0.8
SECOND_SAMPLED_SLOPE: Final = 0.25
# Each further choice is accepted so much less often than the one before it, where that was rejected
# [measured: third choices, greedy, 0.27 after 0.46 (Qwen pair), 0.35 after 0.53 (embedded pair)].
FURTHER_CHOICE: Final = 0.6
# What n-grams predict where the draft model's other token was rejected: intercept and slope by the
# log-odds that they have it at [judgement].
NGRAM_BESIDE: Final = (0.0, 0.5)
MIN_PROBABILITY: Final = 1e-3  # of n-grams, as an input of that [limit]
# The share of tokens that are accepted, before a draft of fixed length has data [judgement].
FIXED_ACCEPTANCE: Final = 0.7
FIXED_ACCEPTANCE_WEIGHT: Final = 8.0  # observations that this counts as [judgement]
MAX_COEFFICIENT: Final = 100  # of a stored model; more is a damaged file [limit]
FORGOTTEN_SHARE: Final = 0.2  # of what a pair's texts have taught, at each new text [judgement]

# Block verification accepts more than its tokens' own probabilities say. [measured: embedded pair,
# 0.12, 0.20, 0.32 and 0.41 tokens more in rounds of 3, 4, 5 and 6 at temperature 1; 0.15 and 0.27
# in those of 3 and 5 at 0.7]
BLOCK_BONUS: Final = 0.07  # share of a token's probability, per token before it; learned further
# The weight of that prior; a round of three tokens has a weight of 2 or 3 [insensitive].
BLOCK_BONUS_WEIGHT: Final = 400.0
MAX_BLOCK_BONUS: Final = 0.5  # [limit]

# How predictable the text is at present, by the target's last logit gaps.
N_GAPS: Final = 16  # that are kept [insensitive: 12 to 32]
N_GAP_LEVELS: Final = 8  # quantiles of them that the rule computes with [insensitive]
PRIOR_GAPS: Final = (0.1, 0.4, 0.8, 1.3, 2.0, 3.0, 4.5, 7.0)  # logits, before a text [judgement]
# Drafting starts again if what it saves in so many tokens, or in as many as were written since
# n-grams were last drafted, pays for reading what the draft model has not read [insensitive].
READING_HORIZON: Final = 5
# The account of a pair (account.py), in plain passes. A new pair starts with START_BALANCE for
# n-grams, and the same for the draft model; so does each text with a seed [recorded texts with
# seeds: 0.64 and 2 equal within 0.2 %; with 2, a draft without certainty is evaluated too long].
START_BALANCE: Final = 1.28
# Far more than a text may lose once its drafts are no longer accepted [recorded texts: 4 to 30
# equal within 0.2 %].
MAX_BALANCE: Final = 8.0
# Of the tokens that it writes, a losing pair may invest this share [limit: below the promised 0.03,
# since the last draft can exceed it].
INVESTED_SHARE: Final = 0.02
# Without a balance, drafts are verified whose expected loss is at most this share of their expected
# gain [recorded texts: 0.3 and 1 equal; embedded pair at 0.8: with less, good drafts are left out].
SMALL_RISK: Final = 0.6

# When plain decoding is measured.
N_PLAIN: Final = 2  # single-token passes before anything is compared with them [judgement]
PLAIN_EVERY: Final = 64  # rounds until another is measured, if the speed-up is small [insensitive]
SMALL_SPEED_UP: Final = 1.4  # over plain decoding [insensitive]

# Forced text: what a constraint leaves no choice about (forced_text.py). Where the target has just
# written it in other tokens, it often does so again.
FORCED_ACCEPTANCE: Final = 0.95  # of a token, before a text
FORCED_ACCEPTANCE_AFTER_REJECTION: Final = 0.5  # of the next one after a rejected one
FORCED_PRIOR_WEIGHT: Final = 4.0  # observations that these count as [judgement]
FORCED_MEMORY: Final = 16.0  # observations until one has lost most of its weight [judgement]

# Advice to the user that drafting does not help.
N_ADVICE: Final = 32  # rounds without draft before it is given [judgement]
ADVICE_SHARE: Final = 0.8  # of all rounds [judgement]

# Costs of passes (cost_model.py).
N_FIRST_MEASUREMENTS: Final = 3  # of a size, of which the fastest counts: first passes are slow
COST_LEARNING_RATE: Final = 0.12  # of later ones, in a moving average [insensitive]
# A pass slower than so many times the known cost was disturbed, and counts as that [simulated:
# 1.04, 1.00].
OUTLIER: Final = 1.7
DRIFT_SHARE: Final = 0.5  # exponent: a change of one size holds for the others so far [insensitive]
# The cost of another token in a batch, over that of one [simulated: 1.01, 1.07].
UNMEASURED_SLOPE: Final = 0.3
# Between two sizes that a device is predicted to compute equally fast, in tokens [limit].
LEAST_DISTANCE: Final = 0.01
UNMEASURED_STEP: Final = 0.08  # a draft step, in target passes [insensitive]
UNMEASURED_READ: Final = 0.25  # a token that the draft model reads in a batch, in steps [judgement]
# Tokens that a head reads before a block without taking much longer. A head that rarely drafts has
# some to read each time: with these counted as what reading costs, the step of a DFlash head was
# taken for 0.5 ms instead of 2.7 for 20 texts [measured].
FEW_BESIDE_BLOCK: Final = 32
# Rows that processors' kernels compute at a time: batches of 4, 8, 12 are cheap [measured: Q4_0 on
# AVX-512, Qwen2.5-Coder-1.5B: 51 ms for three tokens, 36 for four; simulated: 1.08, 1.04].
KERNEL_ROWS: Final = 4
# Old measurements are discounted so that a size is tried again. The more often it was measured, the
# slower [simulated at measured costs: tries went from one round in 25 to one in 100].
N_FRESH_PASSES: Final = 32  # passes over other sizes before that [insensitive]
DISCOUNT_PER_PASS: Final = 0.0005
MIN_DISCOUNT: Final = 0.88
MIN_DISCOUNT_OF_FEW: Final = 0.65  # if measured once or twice: one disturbed pass may be all
MIN_SECONDS: Final = 1e-9  # of a stored pass [limit]
MAX_SECONDS: Final = 1e6
MAX_SIZE_DIGITS: Final = 5  # of a stored number of tokens [limit]
MAX_STORED_SIZE: Final = 10**5  # tokens; larger than any stored size [derived]
N_PASSES_TO_REMEMBER: Final = 8  # after which costs are stored for the next process [judgement]

# n-grams (native/ngrams.h): shortest match; acceptance if all votes agree, and if not; the same of
# matches in other texts [measured: about what was accepted of drafts in the recorded texts; less in
# other texts: with as much, more texts of mixed kinds get slower].
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
NGRAM_KEEP: Final = 1 - 1 / 128  # weight kept by older observations, at each new one [judgement]
NGRAM_LEARNING_RATE: Final = 0.1  # of a text's own level above the priors, log-odds [judgement]

# The draft's temperature (temperature.py); tests/drafting/test_temperature.py bounds the result.
TEMPERATURE_FACTORS: Final = (1.0, 0.0, 0.4, 0.6, 0.8, 1.25, 1.6)  # choices, times the target's
TEMPERATURE_HORIZON: Final = 4  # tokens of a draft compared; later ones have too much variance
N_TEMPERATURE_VALUES: Final = 2**18  # probabilities read in a round, about [limit]
N_TEMPERATURE_FIRST: Final = 8  # rounds before anything is concluded [judgement]
N_TEMPERATURE_EARLY: Final = 16  # rounds that are all learned from [judgement]
TEMPERATURE_EVERY: Final = 4  # later rounds: one in so many [judgement]
TEMPERATURE_EVERY_GREEDY: Final = 8  # one in so many is drawn at the first, to compare [judgement]
TEMPERATURE_MEMORY: Final = 64  # rounds until one has lost most of its weight [judgement]
TEMPERATURE_CERTAINTY: Final = 2.0  # standard errors by which another must be better [judgement]
