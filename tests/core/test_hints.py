"""Hints become numbered classes, bounded; what is said last counts."""

from kvstored.core.hints import HINT_CLASSES_MAX, NO_HINT, FollowUp, Hint, HintClasses


def test_nothing_said_is_class_0_and_so_is_a_session_alone() -> None:
    classes = HintClasses()
    assert classes.number(NO_HINT) == 0
    assert classes.number(Hint(session="s", retention_s=60.0)) == 0


def test_follow_up_and_length_have_fixed_numbers() -> None:
    hints = [
        Hint(follow_up, tokens) for follow_up in FollowUp for tokens in (None, 0, 199, 200, 5000)
    ]
    numbers = [HintClasses().number(hint) for hint in hints]
    assert len(set(numbers)) == 12  # 0 and 199 are one length
    assert numbers == [HintClasses().number(hint) for hint in hints]


def test_categories_get_numbers_until_there_are_no_more_and_then_share_those_without() -> None:
    classes = HintClasses()
    numbers = [
        classes.number(Hint(FollowUp.TOOL_USE, category=f"c{i}"))
        for i in range(10 * HINT_CLASSES_MAX)
    ]
    assert max(numbers) < HINT_CLASSES_MAX
    assert len(set(numbers)) == HINT_CLASSES_MAX - 12 + 1
    assert numbers[-1] == classes.number(Hint(FollowUp.TOOL_USE))
    assert HintClasses(classes.said()).number(Hint(FollowUp.TOOL_USE, category="c5")) == numbers[5]


def test_what_is_said_later_counts_and_the_rest_stays() -> None:
    begun = Hint(session="s", category="agent", priority=2)
    ended = Hint(FollowUp.TOOL_USE, 0, category="chat")
    assert ended.after(begun) == Hint(FollowUp.TOOL_USE, 0, "s", "chat", 2)
