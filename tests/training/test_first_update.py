"""The on-policy first update, in programs that are optimised as in a run."""

import dataclasses

import pytest
from test_step import BASE, OBJECTIVES, TINY, WHOLE, gradient, moved, norm, rollout, score
from tiny import COMPUTE, random_params

from compass_jax.model.transformer import Transformer

pytestmark = pytest.mark.usefixtures("fully_optimised")


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_first_update_is_on_policy_and_clips_nothing(objective, dtype):
    """The temperature is 0.8. The ratio is exactly 1 in bfloat16, too, where ESPO's clip range is
    smaller than the rounding.
    """
    model, params = (
        Transformer(TINY, dataclasses.replace(COMPUTE, dtype=dtype)),
        random_params(TINY),
    )
    arrays, routes = rollout()
    scored, *_ = score(model, params, arrays, routes, WHOLE, 0.8)
    config = dataclasses.replace(BASE, objective=OBJECTIVES[objective])
    grads, metrics = gradient(model, params, scored, config, WHOLE, 0.8)
    print(f"ratio dev {objective}: {float(metrics['policy/ratio_dev_max']):.2e}")
    assert (
        float(metrics["policy/ratio_dev_max"]) == 0
        and float(metrics["policy/clip_frac"]) == 0
        and norm(grads) > 1e-3
    )
    assert float(metrics["policy/kl_k3"]) == 0
    _, later = gradient(model, moved(params), scored, config, WHOLE, 0.8)
    assert float(later["policy/ratio_dev_max"]) > 1e-4 and float(later["policy/kl_k3"]) > 1e-6
