"""What a proof costs: by classes and ranges, not by ranks."""

from __future__ import annotations

from benchmarks.verify import measure, no_two_alike, ppo_70b, timed


def test_a_hundred_thousand_entries_in_about_a_second() -> None:
    """1,024 ranks in 1,024 classes with 98 events."""
    entries, cpu = timed(no_two_alike(1024), 2)
    assert entries > 100_000 and cpu < 1.0  # seconds; 0.03 where nothing else runs


def test_ten_times_the_ranks_cost_about_the_same() -> None:
    """PPO on a 70B model; at 4,096 ranks a proof has more than 100,000 entries."""
    rows, exponent = measure(ppo_70b, (384, 4096), 1)
    assert rows[1][1] > 9 * rows[0][1] and rows[1][1] > 100_000
    assert exponent < 0.5 and rows[1][2] < 5.0, rows
