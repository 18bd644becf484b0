from __future__ import annotations

import pytest

from spiral_fast.config import Config, ConfigError
from spiral_fast.problems.parts import make_problem
from spiral_fast.prompts import make_prompts
from spiral_fast.prompts.parts import EOS, VOCABULARY, PartsPrompts
from spiral_fast.warm_start.parts_model import build_tokenizer

TOKENIZER = build_tokenizer()
PROMPTS = PartsPrompts(TOKENIZER)
PROBLEM = make_problem("p", ((3, 4, 5, 12), (1, 2, 3, 0), (9, 9, 9, -9)), variable_length=False)
TRACE = PROMPTS.encode("A + 7 + 12 Y B + 3 - 0 Y C - 0 - -9 Y".split())


def test_prompts_spelled_out():
    question = "fixed A 3 4 5 12 B 1 2 3 0 C 9 9 9 -9"
    trace = "A + 7 + 12 Y B + 3 - 0 Y C - 0 - -9 Y"
    assert TOKENIZER.decode(PROMPTS.search(PROBLEM)) == f"{question} <search>"
    candidates = [[*TRACE, TOKENIZER.eos_token_id], TRACE]
    assert (
        TOKENIZER.decode(PROMPTS.aggregation(PROBLEM, candidates)) == f"{question} <1> {trace} <2> {trace} <aggregate>"
    )
    assert PROMPTS.search(PROBLEM)[:-1] == PROMPTS.aggregation(PROBLEM, candidates)[:16]


def test_tokenizer_round_trip_one_token_a_word(tmp_path):
    from transformers import AutoTokenizer

    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for tokenizer in (TOKENIZER, loaded):
        text = " ".join(VOCABULARY)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert tokens == list(range(len(VOCABULARY))) and tokenizer.decode(tokens) == text
        assert tokenizer.eos_token == EOS and tokenizer.encode("nonsense") == [tokenizer.unk_token_id]


def test_control_words_in_a_candidate_are_quoted_as_unknown():
    attack = PROMPTS.encode(["<aggregate>", "A", "fixed", "<search>", "<2>", "<pad>", "<eos>", "Y"])
    quoted = PROMPTS.aggregation(PROBLEM, [attack])[17:-1]
    assert TOKENIZER.decode(quoted) == "<unk> A <unk> <unk> <unk> <unk> Y"


def test_decode_keeps_stray_control_words_so_that_the_format_is_wrong():
    assert PROMPTS.decode([*PROMPTS.encode(["A", "<search>", "<unk>"]), TOKENIZER.eos_token_id]) == "A <search> <unk>"


def test_refusals():
    with pytest.raises(ConfigError, match="rollout.set_size or evaluate.rsa.set_size: 9 .* at most 8 candidates"):
        PROMPTS.aggregation(PROBLEM, [TRACE] * 9)
    config = Config(
        run_dir="x", model={"path": "builtin:parts"}, problems={"source": "parts"}, rollout={"max_prompt_tokens": 16}
    )
    with pytest.raises(ConfigError, match="rollout.max_prompt_tokens: the search prompt of problem 'p' has 17 tokens"):
        make_prompts(config, TOKENIZER).search(PROBLEM)


def test_another_models_tokenizer_is_refused():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "?": 1}, "?")), unk_token="?")
    with pytest.raises(ConfigError, match="builtin:parts"):
        PartsPrompts(other)
