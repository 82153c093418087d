"""The forward pass that is trained against the plain one: every setting, logits and gradients, and what it saves."""

from __future__ import annotations

import pytest
import torch

from lane_models import SETTINGS, VOCAB, config
from monotape.models.lanes import delayed, ladder, silent, steps, tensor_parallel
from monotape.training.laneformer import Laneformer
from monotape.training.streams import StreamedLaneformer, schedule, token_losses
from training.tiny_corpus import tiny


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_and_gradients_are_those_of_the_plain_model(name: str) -> None:
    torch.manual_seed(3)
    plain, streamed = Laneformer(config(**SETTINGS[name])), StreamedLaneformer(config(**SETTINGS[name]))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # a gain of 1 that is forgotten would not show
    streamed.load_state_dict(plain.state_dict())
    ids, weight = torch.randint(0, VOCAB, (2, 23)), torch.randn(2, 23, VOCAB)
    want, got = plain(ids), streamed(ids)
    assert torch.linalg.norm(got - want) <= 1e-5 * torch.linalg.norm(want)
    (want * weight).sum().backward()
    (got * weight).sum().backward()
    others = dict(streamed.named_parameters())
    for parameter_name, parameter in plain.named_parameters():
        gradient, other = parameter.grad, others[parameter_name].grad
        if gradient is None:  # of one lane the sum that it leaves itself out of is 0
            assert other is None or not other.any()
            continue
        assert other is not None, parameter_name
        assert torch.linalg.norm(other - gradient) <= 2e-5 * torch.linalg.norm(gradient), parameter_name


@pytest.mark.parametrize(
    ("lanes", "flying", "settled"),
    [
        (tensor_parallel(4), 0, 0),
        (ladder(4), 0, 0),
        (delayed(4, 1), 1, 1),
        (delayed(4, 2), 2, 2),
        (silent(4), 0, 16),
    ],
)
def test_few_partials_are_kept(lanes: object, flying: int, settled: int) -> None:
    """Under a delay of d modules d partials of a lane are in flight, and those of the d early modules stay."""
    made = schedule(lanes, 16)  # type: ignore[arg-type]
    assert max(len(change.coefficients) for change in made.changes[:-1]) == flying
    ended = [one for change in made.changes for one, _ in change.settles]
    assert len(ended) == settled + flying  # the last modules' own partials are final at once


def test_coefficients_add_up_to_the_steps() -> None:
    """For random partials the schedule and the steps give the same residuals."""
    torch.manual_seed(1)
    for lanes in (
        tensor_parallel(3),
        ladder(3),
        delayed(3, 1),
        delayed(3, 2, "sum"),
        delayed(3, 5),
        silent(3),
    ):
        partials = torch.randn(10, 3, dtype=torch.float64)
        want = torch.zeros(3, dtype=torch.float64)
        common, own = torch.zeros((), dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
        made = schedule(lanes, 10)
        for module, step in enumerate(steps(lanes, 10)):
            if module < 10:
                want = want + step.own * partials[module]
            if step.folds is not None:
                total = partials[step.folds].sum()
                want = want + total - (0 if step.whole else partials[step.folds])
                common = common + total
            change = made.changes[module]
            own = own + sum(
                (value * partials[one] for one, value in change.settles), torch.zeros(3, dtype=torch.float64)
            )
            flying = sum(
                (value * partials[one] for one, value in change.coefficients),
                torch.zeros(3, dtype=torch.float64),
            )
            assert torch.allclose(common + own + flying, want)


@pytest.mark.parametrize(
    "arm", ["dtp2-sum", *(pytest.param(arm, marks=pytest.mark.long) for arm in ("tp", "silent"))]
)
def test_it_compiles_as_one_graph(arm: str) -> None:
    """A break in the graph would cost the GPU its speed; the tracer finds it here."""
    torch.manual_seed(0)
    rows = torch.randint(0, 300, (2, 64))
    model = StreamedLaneformer(tiny(arm=arm).config(300, 0))
    compiled = torch.compile(token_losses, fullgraph=True, dynamic=False, backend="aot_eager")
    assert torch.allclose(compiled(model, rows, rows), token_losses(model, rows, rows), atol=1e-5)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bf16_is_close_to_float32() -> None:
    torch.manual_seed(0)
    model = StreamedLaneformer(tiny(arm="dtp2-scale").config(300, 0))
    rows = torch.randint(0, 300, (2, 64))
    want = model(rows)
    model.compute = torch.bfloat16
    got = model(rows)
    assert got.dtype == torch.bfloat16
    assert 0 < torch.linalg.norm(got.float() - want) < 0.03 * torch.linalg.norm(want)
