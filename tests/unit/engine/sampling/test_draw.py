import torch

from headrace.engine.sampling.draw import uniform


def test_the_random_number_depends_on_seed_and_position_only_and_is_uniform() -> None:
    rows = [[uniform(seed, position) for position in range(300)] for seed in range(40)]
    numbers = torch.tensor(rows, dtype=torch.float64)
    assert uniform(5, 7) == uniform(5, 7)
    assert numbers.unique().numel() == numbers.numel()
    counts = torch.histc(numbers, 20, 0, 1)
    assert (counts - 600).abs().max() < 5 * 600**0.5
    assert abs(torch.corrcoef(torch.stack([numbers[:-1].flatten(), numbers[1:].flatten()]))[0, 1]) < 0.05
