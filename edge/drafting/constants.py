"""Every number that decides about drafts, each with its reason or what was measured for it.

Times are in plain steps of the moment: one step of the target without drafts. What keeps memory
bounded, such as sizes of tables, stands beside the tables.
"""

# -- the ledger (combined.py) ------------------------------------------------------------
ALLOWANCE = 0.004  # plain steps a round: what a useless drafter costs in the long run, 0.4%
FIRST_BALANCE = 2.0  # plain steps: in replays of first answers 1 cost up to 1.5%, 4 brought nothing
HIGHEST_BALANCE = 12.0  # plain steps: 4 cost 5% where t(32) is 7.2, 24 is the same as 12
RESERVE = 0.5  # of a balance, for n-gram hits: 0 cost 0.5% where steps are steep, 1 is as good
ASKING_TIMES = 3.0  # times its lookup that asking a table takes: choosing, counting, telling too
# Times as long as estimated, up to which a step is paid for; `HICCUP` times where two in a row took
# longer than that. In replays with three of ten steps disturbed 3 and 3 cost 2.5%.
LONGEST_ALONE = 1.3
USUAL_PROMPT = 512  # tokens of a prompt that a draft model may read before it has earned anything
# Rounds that savings, histories and the tries of a cell are sums of; older ones fade: not measured.
MOST_ROUNDS = 5000.0
TELLING_ROUNDS = 300  # rounds or tokens that counts must be of: not measured, two answers or three
LASTING_S = 24 * 3600.0  # no stored figure keeps a drafter out for longer: one try a day

# Times the tokens/ms of plain decoding that drafts of tables must promise: the best of many counts
# is too good. In replays of first answers one in twenty lost 1.1% more with 1.0 at temperature 0.8,
# and 1.15 cost 0.4% on average.
REQUIRED_GAIN = 1.08

# -- what is drafted at most ---------------------------------------------------------------------
LONGEST = 16  # tokens that a model writes ahead: room for them is kept in its context
MOST_DRAWN = 8  # nodes with a distribution, which is a number for each token of the vocabulary
WIDTH = 8  # best tokens that are kept of a row (K of token recycling, arXiv 2408.08696)
SPREAD = 5.3  # logits below the best one: a two-hundredth of its probability

# -- the target over a part of its cache (model.py) ----------------------------------------------
WINDOW_FIRST, WINDOW_LAST = 4, 512  # cells it sees
WINDOW_GAINS = (0.85, 0.71, 0.58, 0.48)  # tokens that a first draft brings, a second, ... (LOG.md)

# -- acceptance by counting (proposal.py) --------------------------------------------------------
CELL_STRENGTH = 6.0  # tries that the group of a cell counts for in it
RECENT_STRENGTH = 40.0  # tries that a cell counts for beside those of lately
RECENT_DECAY = 0.9  # of lately, from one to the next: half of them are the last seven
# Tries of a cell that counts of elsewhere stand for at most: of other models, a file's own, and of
# earlier texts at a place of a chain, as the next one may be of another kind.
PRIOR_TRIES = 20.0
PRIOR_ODDS = 0.5  # of the odds elsewhere: one standard deviation between models

# -- the suffix drafter (suffix.py) --------------------------------------------------------------
OLD_TEXT_WEIGHT = 0.05  # a vote from an older text against one from this text
LENGTH_BORDERS = (2, 3, 4, 5, 7, 10, 15, 23, 40, 64)  # of matches; cells of even counts
VOTE_BORDERS = (0.3, 0.5, 0.65, 0.8, 0.9, 0.97, 0.995)  # shares of the votes
AGREEING_BORDERS = (2, 3, 5, 9)  # places that agree
# Guesses by length of the match: a longer one is likelier to go on, an older text less so.
OF_THIS_TEXT = (0.3, 0.375, 0.45, 0.525, 0.6, 0.675, 0.75, 0.825, 0.9, 0.9, 0.9)
OF_OLDER_TEXTS = (*(0.7 * chance for chance in OF_THIS_TEXT[:-2]), 0.85, 0.97)

# -- token recycling (recycling.py) --------------------------------------------------------------
RECYCLED_BORDERS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 0.98)  # shares in a row
RIVAL_BORDERS = (0.01, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)  # what others propose beside a node
RECYCLED_GUESSES = ((0.3, 0.08, 0.04, 0.02), (0.18, 0.05, 0.03, 0.02))  # by table and rank

# -- a draft model of another vocabulary (translated.py) -----------------------------------------
TEXT_FIRST = 64  # tokens at the beginning of a text that it goes on seeing, as in plan.py
# Tokens that it reads at once. 512 take 18 steps of a 1.5B model on two cores; with the last 512 a
# 135M model is right at 0.63 of all places, with 256 at 0.62, with 64 at 0.60 (LOG.md).
TEXT_READ = 192
# Tokens that a first draft brings, a second, ...; and drafts that were right, and all, by the share
# that the draft model gave them: tokens with others behind them, and last ones. Mean and sums of
# three pairs: SmolLM2 135M and Gemma 3 270M for Qwen2.5-Coder 1.5B (0.65 and 0.63 of first drafts),
# SmolLM2 for Gemma (0.64); 20 prompts of edge/measure/prompts.jsonl, 48 tokens each
# (benchmarks/translated.py priors).
TRANSLATED_GAINS = (0.64, 0.45, 0.33, 0.24)
TRANSLATED_HITS = (
    ((0, 1), (5, 15), (58, 240), (125, 298), (158, 271), (160, 234), (160, 189), (142, 157),
     (142, 147), (57, 58), (230, 242)),
    ((0, 2), (0, 7), (34, 127), (58, 152), (69, 133), (69, 103), (67, 86), (65, 77), (58, 69),
     (19, 25), (114, 132)),
)  # fmt: skip

# -- drafters that write ahead (model.py) --------------------------------------------------------
SHARE_BORDERS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99, 0.999)  # of the draft's token
# Guesses by best or drawn, and rank; the first one is that of any place of a chain, too.
DRAFT_GUESSES = ((0.7, 0.15, 0.05), (0.6, 0.15, 0.05))
# What a draft model says of its best token holds 0.8 times to the power of 1.5: of a head trained
# for minutes, shares of 0.27, 0.42, 0.57, 0.72, 0.85, 0.93 were right 0.12, 0.24, 0.33, 0.44, 0.76
# and 0.8 times (940 places).
BELIEF, BELIEF_POWER = 0.8, 1.5
