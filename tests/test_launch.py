from kvstored.launch import NON_TEMPORAL, tuned


def test_the_c_library_is_told_only_what_the_configuration_and_the_environment_leave_open() -> None:
    told = {"A": "1", "GLIBC_TUNABLES": f"{NON_TEMPORAL}=0x40000"}
    assert tuned({"A": "1"}, 0) == {"A": "1"}
    assert tuned({"A": "1"}, 256 << 10) == told
    assert tuned(told, 1 << 20) == told
    other = {"GLIBC_TUNABLES": "glibc.malloc.check=1"}
    assert tuned(other, 256 << 10) == {
        "GLIBC_TUNABLES": f"glibc.malloc.check=1:{NON_TEMPORAL}=0x40000"
    }
