from __future__ import annotations

import pytest

from spiral_fast.config import ConfigError, RolloutConfig, load_config
from spiral_fast.rollout import chosen
from spiral_fast.rollout.chosen import chosen_engine


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.engine=radix", "rollout.servers=[http://a:1]"], "rollout.servers: ['http://a:1'] cannot be used: "),
        (["rollout.servers=[a:30000]"], "rollout.servers: 'a:30000' cannot be used: not an http or https URL"),
        (["rollout.servers=['http://']"], "rollout.servers: 'http://' cannot be used: not an http or https URL"),
        (["rollout.servers=['http://a:port']"], "rollout.servers: 'http://a:port' cannot be used: not a URL ("),
        (["rollout.servers=['http://[a']"], "rollout.servers: 'http://[a' cannot be used: not a URL ("),
        (["rollout.servers=['http://me:key@a:1']"], "use the environment variable SPIRAL_FAST_SERVER_KEY"),
        (["rollout.servers=['http://a:1/?key=k']"], "it has a query"),
        (["rollout.servers=['http://a:1', 'http://a:1/']"], "a server is named twice"),
        (["rollout.engine=sglang", "rollout.batch_invariant=true"], "set rollout.engine: radix"),
        (["rollout.sglang.args={tp-size: 2}"], "it is set by rollout.sglang.tensor_parallel"),
        (["rollout.sglang.args={--model-path: m}"], "it is set by model.path"),
        (["rollout.sglang.args={api_key: k}"], "it is set by the environment variable SPIRAL_FAST_SERVER_KEY"),
        (["rollout.sglang.args={schedule_policy: fcfs}"], "spiral-fast sets it itself"),
        (["rollout.sglang.args={trust_remote_code: true}"], "spiral-fast sets it itself"),
        (["rollout.sglang.args={'a b': 1}"], "a flag is written as SGLang's own name"),
        (["rollout.sglang.args={disable_radix_cache: false}"], "a flag that is off is left out"),
        (["rollout.sglang.args={a: [1]}"], "rollout.sglang.args: [1] is not allowed: "),
        (["rollout.sglang.timeout_s=0"], "rollout.sglang.timeout_s: 0 is not allowed: "),
        (["rollout.sglang.memory_fraction=1"], "rollout.sglang.memory_fraction: 1 is not allowed: "),
    ],
)
def test_refused_in_one_line(overrides, says):
    with pytest.raises(ConfigError) as error:
        load_config("configs/demo.yaml", overrides)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_allowed():
    config = load_config(
        "configs/demo.yaml",
        ["rollout.servers=['http://a:30000', 'https://b/prefix']", "rollout.sglang.args={attention_backend: fa3}"],
    )
    assert config.rollout.sglang.args == {"attention_backend": "fa3"}


def test_auto(monkeypatch):
    auto, servers = RolloutConfig(), RolloutConfig(servers=["http://a"])
    for installed in (False, True):
        monkeypatch.setattr(chosen, "sglang_installed", lambda installed=installed: installed)
        assert chosen_engine(auto, cuda=False) == "radix"
        assert chosen_engine(auto, cuda=True) == ("sglang" if installed else "radix")
        assert chosen_engine(servers, cuda=False) == "sglang"
        assert chosen_engine(RolloutConfig(engine="sglang"), cuda=False) == "sglang"
        assert chosen_engine(RolloutConfig(engine="radix"), cuda=True) == "radix"
