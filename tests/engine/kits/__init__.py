"""Tests that SGLang's wheel brings (`sglang.test`), called as they are, with and without our L3."""
