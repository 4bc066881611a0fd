"""The reference: lossless with random models, every branch of the method with scripted ones.

A scripted target says the next token of TRUTH whatever came before; a scripted drafter is right except at
chosen positions. That makes every outcome of a round happen on purpose.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from d3d_sglang.layout import sync_layout
from d3d_sglang.masks import dense_mask
from d3d_sglang.reference import Generation, LogitsOf, Method, block_logits, target_logits
from tests.tiny import MASK_TOKEN_ID, VOCAB_SIZE, tiny_llama

# The same fp32 forward with its sums in another order; logits are below 6. Seen: 2e-6.
LOGITS_ATOL = 2e-5
NO_EOS: frozenset[int] = frozenset()
TRUTH = [(7 * i + 3) % 29 for i in range(200)]
PROMPT = TRUTH[:5]
BLOCK_SIZE = 5


def plain_greedy(model: LlamaForCausalLM, prompt_ids: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt_ids)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt_ids) :]


def random_prompt(seed: int) -> list[int]:
    return torch.randint(MASK_TOKEN_ID, (6,), generator=torch.Generator().manual_seed(seed)).tolist()


def ranked(*tokens: int) -> torch.Tensor:
    """Logits `[V]` that rank `tokens` first, in this order."""
    logits = torch.zeros(VOCAB_SIZE)
    for rank, token in enumerate(tokens):
        logits[token] = 10.0 - rank
    return logits


def scripted_target(tokens: list[int]) -> torch.Tensor:
    return torch.stack([ranked(TRUTH[i + 1]) for i in range(len(tokens))])


@dataclass
class ScriptedDrafter:
    """Predicts TRUTH, except that at positions of `wrong` it ranks another token first and TRUTH second.

    At positions of `lost` TRUTH is not even second. Remembers what it was asked.
    """

    wrong: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    asked: list[list[int]] = field(default_factory=list)

    def __call__(self, tokens: list[int]) -> torch.Tensor:
        self.asked.append(list(tokens))
        return torch.stack([self._at(len(tokens) + j) for j in range(BLOCK_SIZE - 1)])

    def _at(self, position: int) -> torch.Tensor:
        truth = TRUTH[position]
        if position in self.lost:
            return ranked(truth + 1, truth + 2)
        return ranked(truth + 1, truth) if position in self.wrong else ranked(truth)


def scripted(drafter: LogitsOf, *, num_tokens: int = 12, **settings: object) -> Generation:
    method = Method(target=scripted_target, drafter=drafter, **settings)  # type: ignore[arg-type]
    generation = method.generate(PROMPT, num_tokens, eos_ids=NO_EOS)
    assert generation.output_ids == TRUTH[5 : 5 + num_tokens]
    return generation


# Random models


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("mode", "coverage", "fanout", "block_size"),
    [("sync", 1, 1, 2), ("sync", 1, 1, 6), ("async", 1, 1, 4), ("async", 3, 2, 4), ("async", 9, 3, 2)],
)
def test_greedy_equals_plain_decoding(
    seed: int, mode: str, coverage: int, fanout: int, block_size: int
) -> None:
    target, drafter = tiny_llama(seed), tiny_llama(seed + 100)
    method = Method(
        target=target_logits(target),
        drafter=block_logits(drafter, block_size=block_size, mask_token_id=MASK_TOKEN_ID),
        mode=mode,  # type: ignore[arg-type]
        coverage=coverage,
        fanout=fanout,
    )
    prompt = random_prompt(seed)
    generation = method.generate(prompt, 16, eos_ids=NO_EOS)
    assert generation.output_ids == plain_greedy(target, prompt, 16)
    assert all(MASK_TOKEN_ID not in r.draft for r in generation.rounds)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("seed", range(2))
def test_greedy_equals_plain_decoding_when_drafts_are_good(seed: int, mode: str) -> None:
    """A drafter that knows the target's tokens and errs at random: long acceptances, hits and misses."""
    target, prompt = tiny_llama(seed), random_prompt(seed)
    truth = prompt + plain_greedy(target, prompt, 90)
    generator = torch.Generator().manual_seed(seed)

    def drafter(tokens: list[int]) -> torch.Tensor:
        noise = torch.rand(3, VOCAB_SIZE, generator=generator)
        knows = torch.rand(3, generator=generator) < 0.75
        noise[range(3), truth[len(tokens) : len(tokens) + 3]] += knows.float()
        return noise

    settings = {"mode": mode, "coverage": 3, "fanout": 8}
    method = Method(target=target_logits(target), drafter=drafter, **settings)  # type: ignore[arg-type]
    generation = method.generate(prompt, 80, eos_ids=NO_EOS)
    assert generation.output_ids == truth[6:86]
    assert {r.accept_len for r in generation.rounds} == {0, 1, 2, 3}
    assert {r.origin for r in generation.rounds} == (
        {"redraft", "hit", "full"} if mode == "async" else {"redraft"}
    )


@pytest.mark.parametrize("known_len", [1, 2, 4])
def test_sync_draft_equals_layout_and_mask(known_len: int) -> None:
    """The pass a server runs (cached prefix, verified block, new block), on the same model."""
    model, block_size, prefix = tiny_llama(7), 4, random_prompt(1)
    block, anchor = [3, 1, 4, 1], 5
    layout = sync_layout(
        prefix_len=torch.tensor([len(prefix)]), known_len=torch.tensor([known_len]), block_size=block_size
    )
    cache = DynamicCache(config=model.config)
    model(torch.tensor([prefix]), past_key_values=cache, use_cache=True)
    sees = dense_mask(layout, max_prefix=len(prefix))
    served = model(
        torch.tensor([[*block, anchor, *[MASK_TOKEN_ID] * (block_size - 1)]]),
        position_ids=layout.position_ids,
        attention_mask=torch.zeros(sees.shape).masked_fill(~sees, float("-inf"))[:, None],
        past_key_values=cache,
        use_cache=True,
    ).logits[0, block_size + 1 :]
    expected = block_logits(model, block_size=block_size, mask_token_id=MASK_TOKEN_ID)(
        [*prefix, *block[:known_len], anchor]
    )
    assert (expected[:, MASK_TOKEN_ID] == float("-inf")).all()
    served[:, MASK_TOKEN_ID] = float("-inf")
    torch.testing.assert_close(served, expected, atol=LOGITS_ATOL, rtol=0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_block_sees_causal_context_and_both_directions(implementation: str) -> None:
    model = tiny_llama(3)
    model.set_attn_implementation(implementation)
    tokens = random_prompt(2)
    plain = target_logits(model)(tokens)
    drafted = block_logits(model, block_size=1 + 3, mask_token_id=MASK_TOKEN_ID)(tokens)
    alone = block_logits(model, block_size=1 + 1, mask_token_id=MASK_TOKEN_ID)(tokens)
    assert drafted.shape == (3, VOCAB_SIZE) and plain.shape == (6, VOCAB_SIZE)
    # Both directions: the first masked position changes with the number of masks after it.
    assert (drafted[0, :MASK_TOKEN_ID] - alone[0, :MASK_TOKEN_ID]).abs().max() > 0.01
    model.set_attn_implementation("sdpa")
    same = block_logits(model, block_size=1 + 3, mask_token_id=MASK_TOKEN_ID)(tokens)
    torch.testing.assert_close(drafted, same, atol=LOGITS_ATOL, rtol=0)


# Scripted models: every outcome of a round


@pytest.mark.parametrize("coverage", [1, 3, BLOCK_SIZE])
@pytest.mark.parametrize("position", range(1, BLOCK_SIZE))
def test_rejection_is_a_hit_within_coverage(position: int, coverage: int) -> None:
    """Candidate `position` of the first block is wrong, the target's token is the drafter's second choice."""
    drafter = ScriptedDrafter(wrong={5 + position})
    first, second = scripted(drafter, coverage=coverage, fanout=1).rounds[:2]
    assert (first.origin, first.prop_len, first.accept_len) == ("redraft", BLOCK_SIZE - 1, position - 1)
    assert first.bonus == TRUTH[5 + position] == second.anchor
    assert second.origin == ("hit" if position <= coverage - 1 else "redraft")
    assert second.draft == TRUTH[6 + position :][: BLOCK_SIZE - 1]


@pytest.mark.parametrize("fanout", [1, 2, 3])
def test_fanout_decides_how_deep_a_hit_may_lie(fanout: int) -> None:
    """The target's token is the drafter's third choice: covered by a fan-out of 2, since ranks start at 2."""

    def drafter(tokens: list[int]) -> torch.Tensor:
        truth = [TRUTH[len(tokens) + j] for j in range(BLOCK_SIZE - 1)]
        return torch.stack([ranked(t + 1, t + 2, t) for t in truth])

    second = scripted(drafter, coverage=2, fanout=fanout).rounds[1]
    assert second.origin == ("hit" if fanout >= 2 else "redraft")


def test_bonus_outside_the_fanout_is_a_miss() -> None:
    second = scripted(ScriptedDrafter(lost={6}), coverage=BLOCK_SIZE, fanout=1).rounds[1]
    assert second.origin == "redraft"


def test_full_acceptance_leaves_one_candidate_fewer() -> None:
    """Always right: B-1 candidates once, then B-2 of a full branch every time, all accepted."""
    drafter = ScriptedDrafter()
    rounds = scripted(drafter, num_tokens=16, coverage=2, fanout=1).rounds
    assert [r.origin for r in rounds] == ["redraft", *["full"] * (len(rounds) - 1)]
    assert [r.prop_len for r in rounds] == [BLOCK_SIZE - 1, *[BLOCK_SIZE - 2] * (len(rounds) - 1)]
    assert all(r.accept_len == r.prop_len for r in rounds)
    position = 5
    for current in rounds:
        assert (current.anchor, current.draft) == (TRUTH[position], TRUTH[position + 1 :][: current.prop_len])
        position += current.accept_len + 1


def test_full_branch_starts_at_the_last_candidate() -> None:
    """Contexts of the full branches: everything up to candidate prop_len, which is the anchor."""
    drafter = ScriptedDrafter()
    scripted(drafter, num_tokens=1 + 5 + 4, coverage=1)
    # The prompt and the first token; 4 candidates further; after 4 + bonus again 3 candidates further.
    assert drafter.asked == [TRUTH[:6], TRUTH[: 6 + 4], TRUTH[: 6 + 5 + 3]]


def test_wrong_guess_of_the_bonus_is_a_miss() -> None:
    rounds = scripted(ScriptedDrafter(wrong={5 + BLOCK_SIZE}), coverage=BLOCK_SIZE, fanout=1).rounds
    assert rounds[0].accept_len == BLOCK_SIZE - 1
    assert (rounds[1].origin, rounds[1].prop_len) == ("redraft", BLOCK_SIZE - 1)


def test_blocks_of_two_leave_nothing_after_full_acceptance() -> None:
    """B = 2: a full branch guesses the bonus and no candidate; the round after it starts at the anchor."""

    def drafter(tokens: list[int]) -> torch.Tensor:
        return ranked(TRUTH[len(tokens)])[None]

    rounds = scripted(drafter, coverage=2, fanout=1).rounds
    assert [r.prop_len for r in rounds[:3]] == [1, 0, 0]
    assert [r.origin for r in rounds[:3]] == ["redraft", "full", "full"]


@pytest.mark.parametrize(("coverage", "fanout"), [(1, 2), (2, 1), (3, 2), (12, 3)])
def test_branches_drafted_per_round(coverage: int, fanout: int) -> None:
    """(C-1) F rejection branches, none beyond the candidates there are, and one for full acceptance."""
    drafter = ScriptedDrafter()
    method = Method(target=scripted_target, drafter=drafter, coverage=coverage, fanout=fanout)
    proposal = method.draft(TRUTH[:6])
    drafter.asked.clear()
    branches = method.draft_ahead(TRUTH[:6], proposal)
    num_positions = min(coverage - 1, BLOCK_SIZE - 1)
    assert len(branches) == len(drafter.asked) == num_positions * fanout + 1
    per_position = Counter(accept_len for accept_len, _ in branches)
    assert per_position == Counter({k: fanout for k in range(num_positions)} | {BLOCK_SIZE - 1: 1})
    for (accept_len, bonus), branch in branches.items():
        if branch.origin == "hit":
            assert bonus != proposal.tokens[accept_len]
            assert [*TRUTH[:6], *proposal.tokens[:accept_len], bonus] in drafter.asked


def test_sync_drafts_once_a_round() -> None:
    drafter = ScriptedDrafter(wrong={8, 11})
    generation = scripted(drafter, mode="sync")
    assert len(drafter.asked) == len(generation.rounds)
    assert all(r.origin == "redraft" for r in generation.rounds)


# Ends and counting


def test_tau_counts_tokens_after_the_first_one() -> None:
    # Rounds add 5, then 4, then 4 (full branches): 1 + 13 tokens in 3 rounds.
    generation = scripted(ScriptedDrafter(), num_tokens=14)
    assert len(generation.rounds) == 3
    assert generation.tau == pytest.approx(13 / 3)


def test_tokens_past_the_limit_do_not_count() -> None:
    generation = scripted(ScriptedDrafter(), num_tokens=12)
    assert len(generation.rounds) == 3
    assert generation.tau == pytest.approx(11 / 3)


def test_end_token_inside_an_accepted_block_cuts_the_output() -> None:
    end = TRUTH[7]
    method = Method(target=scripted_target, drafter=ScriptedDrafter())
    generation = method.generate(PROMPT, 12, eos_ids=frozenset({end}))
    assert generation.output_ids == TRUTH[5:8]
    assert (len(generation.rounds), generation.tau) == (1, 2.0)


@pytest.mark.parametrize(("limit", "eos_ids"), [(1, NO_EOS), (5, frozenset({TRUTH[5]}))])
def test_first_token_can_be_the_last(limit: int, eos_ids: frozenset[int]) -> None:
    generation = Method(target=scripted_target, drafter=ScriptedDrafter()).generate(
        PROMPT, limit, eos_ids=eos_ids
    )
    assert (generation.output_ids, generation.rounds) == ([TRUTH[5]], [])


# Sampling

SMALL_VOCAB = 3
NUM_SAMPLES = 3000
# Chi-square with 26 degrees of freedom exceeds 70 with probability 7e-6; the seed is fixed.
CHI_SQUARE_LIMIT = 70.0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_sampled_output_has_the_targets_distribution(mode: str) -> None:
    """Three tokens from a target that is a Markov chain, against the chain's own probabilities."""
    temperature = 0.7
    table = torch.randn(SMALL_VOCAB, SMALL_VOCAB, generator=torch.Generator().manual_seed(5))
    chain = (table / temperature).softmax(dim=-1)
    drafts = torch.randn(SMALL_VOCAB, 3, SMALL_VOCAB, generator=torch.Generator().manual_seed(6))
    method = Method(
        target=lambda tokens: table[tokens],
        drafter=lambda tokens: drafts[tokens[-1]],
        mode=mode,  # type: ignore[arg-type]
        coverage=3,
        fanout=1,
        temperature=temperature,
        generator=torch.Generator().manual_seed(0),
    )
    seen: Counter[tuple[int, ...]] = Counter()
    origins: Counter[str] = Counter()
    for _ in range(NUM_SAMPLES):
        generation = method.generate([0], 3, eos_ids=NO_EOS)
        seen[tuple(generation.output_ids)] += 1
        origins.update(r.origin for r in generation.rounds)
    statistic = 0.0
    for a, b, c in itertools.product(range(SMALL_VOCAB), repeat=3):
        expected = NUM_SAMPLES * float(chain[0, a] * chain[a, b] * chain[b, c])
        statistic += (seen[a, b, c] - expected) ** 2 / expected
    assert statistic < CHI_SQUARE_LIMIT
    assert (origins["hit"] > 0) == (mode == "async")


def test_the_generator_decides_the_samples() -> None:
    target, drafter = tiny_llama(0), tiny_llama(1)

    def run(seed: int) -> list[int]:
        method = Method(
            target=target_logits(target),
            drafter=block_logits(drafter, block_size=4, mask_token_id=MASK_TOKEN_ID),
            mode="sync",
            temperature=1.0,
            generator=torch.Generator().manual_seed(seed),
        )
        return method.generate(random_prompt(0), 10, eos_ids=NO_EOS).output_ids

    assert run(1) == run(1) != run(2)
