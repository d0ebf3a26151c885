import numpy as np
import pytest
from agentsd_eval.quality.gain import Line, cheapest, cost_at, gain


def test_between_two_points_the_cost_is_on_the_line_of_the_logarithms():
    costs, distances = np.array([5.0, 20.0]), np.array([0.4, 0.1])
    assert cost_at(0.2, costs, distances)[0] == pytest.approx(10)
    assert cost_at(0.4, costs, distances)[0] == pytest.approx(5)
    assert cost_at(0.01, costs, distances)[0] == pytest.approx(20)


def test_a_dearer_point_that_is_no_nearer_is_not_paid_for():
    costs, distances = np.array([5.0, 10.0, 20.0]), np.array([0.2, 0.3, 0.1])
    assert cost_at(0.2, costs, distances)[0] == pytest.approx(5)


@pytest.mark.parametrize("order", [1, -1])
def test_of_equally_cheap_points_the_nearer_counts(order):
    """By hand: on the line from (.8, 1) to (.2, 4), half of the way is 2; (.4, 4) is no part of it."""
    costs, distances = np.array([1.0, 4.0, 4.0])[::order], np.array([0.8, 0.4, 0.2])[::order]
    assert cost_at(0.4, costs, distances)[0] == pytest.approx(2.0)
    assert cost_at(0.2, costs, distances)[0] == pytest.approx(4.0)
    costs, distances = np.array([100.0, 50, 100, 50])[::order], np.array([0.2, 0.3, 0.1, 0.2])[::order]
    assert cost_at(0.15, costs, distances)[0] == pytest.approx(50 * 2 ** (np.log(0.2 / 0.15) / np.log(2)))


def test_of_two_samplers_the_cheaper_line_counts():
    """By hand: at .2 it is 10 on the first line and 12 on the second."""
    first = np.array([5.0, 20.0]), np.array([0.4, 0.1])
    second = np.array([6.0, 24.0]), np.array([0.4, 0.1])
    assert cheapest(0.2, [first, second]) == (pytest.approx(10), None)
    assert cheapest(0.2, [second, first]) == (pytest.approx(10), None)
    assert cheapest(0.5, [second, first]) == (pytest.approx(5), "less")
    assert cheapest(0.05, [second, first]) == (pytest.approx(20), "more")


def test_points_of_two_samplers_are_not_joined():
    """The second one's point lies between the first one's, above its line: joined they would cost more."""
    first = np.array([10.0, 40.0]), np.array([0.4, 0.1])
    second = np.array([25.0]), np.array([0.19])
    assert cheapest(0.22, [first, second])[0] == pytest.approx(10 * 0.4 / 0.22)


def test_a_sampler_that_was_not_measured_as_near_bounds_the_cost():
    """In more steps it might come as near for anything above its dearest."""
    far = np.array([1.0, 2.0]), np.array([0.8, 0.4])
    near = np.array([5.0, 20.0]), np.array([0.4, 0.1])
    assert cheapest(0.2, [far, near]) == (pytest.approx(2), "more")
    assert cheapest(0.2, [(20 * far[0], far[1]), near]) == (pytest.approx(10), None)


def line(plain):
    return Line(list(plain), np.array(list(plain.values())))


@pytest.fixture
def plain():
    rng = np.random.default_rng(0)
    own = np.exp(rng.normal(0, 1, 64))  # some seeds are far whatever the steps
    return {steps: own / steps for steps in (25, 12, 6)}


def test_fewer_steps_themselves_are_worth_one(plain):
    for steps in plain:
        ours = gain(plain[steps], steps, [line(plain)])
        assert ours.value == pytest.approx(1)
        assert ours.low == pytest.approx(1)  # each seed moves both alike


def test_twice_as_cheap_at_the_same_distance_is_worth_two(plain):
    ours = gain(plain[12], 6.0, [line(plain)])
    assert ours.value == pytest.approx(2)
    assert ours.beyond is None


def test_what_is_off_the_curve_says_so(plain):
    near = gain(plain[25] / 10, 25, [line(plain)])
    far = gain(plain[6] * 10, 1, [line(plain)])
    assert (near.value, near.beyond) == (pytest.approx(1), "more")
    assert (far.value, far.beyond) == (pytest.approx(6), "less")


def test_a_seed_whose_image_is_the_reference_itself_is_in_no_mean(plain):
    ours = plain[12] * np.append(0, np.ones(63))
    rest = [distances[1:] for distances in plain.values()]
    expected = gain(plain[12][1:], 6.0, [Line(list(plain), np.array(rest))])
    assert gain(ours, 6.0, [line(plain)]).value == pytest.approx(expected.value)
    assert gain(0 * ours, 6.0, [line(plain)]).beyond == "more"  # all of them


def test_unlike_seeds_widen_the_interval(plain):
    shuffled = np.random.default_rng(1).permutation(plain[12])
    ours = gain(shuffled, 12, [line(plain)])
    assert ours.low < 0.9 < 1.1 < ours.high
