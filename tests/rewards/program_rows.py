"""Rows in the columns of LeetCodeDataset, BigCodeBench and KodCode, each with a right program (its
own) and a wrong one. If a row must be refused, its third part is what the refusal says."""

_LEET_PROMPT = """import random
import functools
import collections
import string
import math
import datetime

from typing import *
from functools import *
from collections import *
from itertools import *
from heapq import *
from bisect import *
from string import *
from operator import *
from math import *

inf = float('inf')


class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next


def list_node(values):
    head = None
    for value in reversed(values):
        head = ListNode(value, head)
    return head


def is_same_list(p1, p2):
    while p1 and p2:
        if p1.val != p2.val:
            return False
        p1, p2 = p1.next, p2.next
    return p1 is None and p2 is None


class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val = val
        self.left = left
        self.right = right


def tree_node(values):
    if not values:
        return None
    nodes = [None if x is None else TreeNode(x) for x in values]
    rest = nodes[1:]
    for node in filter(None, nodes):
        node.left = rest.pop(0) if rest else None
        node.right = rest.pop(0) if rest else None
    return nodes[0]


def is_same_tree(p, q):
    if p is None or q is None:
        return p is q
    return p.val == q.val and is_same_tree(p.left, q.left) and is_same_tree(p.right, q.right)
"""


def _indented(text, spaces):
    return "".join(f"{' ' * spaces}{line}\n" for line in text.strip("\n").split("\n"))


def leet(name, method, head, body, wrong, *asserts):
    """Returns a row of LeetCodeDataset, and a wrong program."""

    def program(body):
        return f"class Solution:\n    def {method}{head}:\n{_indented(body, 8)}"

    test = "def check(candidate):\n" + _indented("\n".join(f"assert {x}" for x in asserts), 4)
    row = {
        "task_id": name,
        "question_id": 1,
        "difficulty": "Easy",
        "tags": ["Array"],
        "problem_description": name,
        "starter_code": f"class Solution:\n    def {method}{head}:\n        ",
        "estimated_date": "2020-01-01",
        "prompt": _LEET_PROMPT,
        "completion": program(body),
        "entry_point": f"Solution().{method}",
        "test": test,
        "input_output": [{"input": "x = 1", "output": "1"}],
        "query": f"You are an expert Python programmer.\n\n### Question:\n{name}",
        "response": f"```python\n{program(body)}```",
    }
    return row, program(wrong)


LEETCODE = {
    row["task_id"]: (row, wrong, "")
    for row, wrong in (
        leet("two-sum", "twoSum", "(self, nums: List[int], target: int) -> List[int]",
             "seen = {}\nfor i, x in enumerate(nums):\n    if target - x in seen:\n"
             "        return [seen[target - x], i]\n    seen[x] = i", "return [0, 1]",
             "candidate(nums = [3, 3], target = 6) == [0, 1]",
             "candidate(nums = [2, 5, 9], target = 14) == [1, 2]"),
        leet("reverse-linked-list", "reverseList", "(self, head: Optional[ListNode])",
             "last = None\nwhile head:\n    head.next, last, head = last, head, head.next\n"
             "return last", "return head",
             "is_same_list(candidate(head = list_node([1, 2, 3])), list_node([3, 2, 1]))",
             "is_same_list(candidate(head = list_node(range(300))), list_node(range(299, -1, -1)))",
             "is_same_list(candidate(head = list_node([])), list_node([]))"),
        leet("linked-list-sum", "total", "(self, head: Optional[ListNode]) -> int",
             "return head.val + self.total(head.next) if head else 0", "return head.val",
             "candidate(head = list_node([1, 2, 3])) == 6"),
        leet("invert-binary-tree", "invertTree", "(self, root: Optional[TreeNode])",
             "if root:\n    left, right = root.left, root.right\n"
             "    root.left, root.right = self.invertTree(right), self.invertTree(left)\n"
             "return root", "return root",
             "is_same_tree(candidate(root = tree_node([2, 1, 3])), tree_node([2, 3, 1]))",
             "is_same_tree(candidate(root = tree_node([])), tree_node([]))"),
        leet("maximum-depth", "maxDepth", "(self, root: Optional[TreeNode]) -> int",
             "return 1 + max(map(self.maxDepth, (root.left, root.right))) if root else 0",
             "return 2", "candidate(root = tree_node([3, 9, 20, None, None, 15, 7])) == 3",
             "candidate(root = tree_node([1, None, 2])) == 2"),
        leet("build-a-tree", "build", "(self, nums: List[int]) -> Optional[TreeNode]",
             "if not nums:\n    return None\nm = len(nums) // 2\n"
             "return TreeNode(nums[m], self.build(nums[:m]), self.build(nums[m + 1:]))",
             "return TreeNode(nums[0]) if nums else None",
             "is_same_tree(candidate(nums = [1, 2, 3]), tree_node([2, 1, 3]))"),
        leet("add-two-numbers", "addTwoNumbers", "(self, l1, l2)",
             "carry, first = 0, ListNode()\nlast = first\nwhile l1 or l2 or carry:\n"
             "    carry += (l1.val if l1 else 0) + (l2.val if l2 else 0)\n"
             "    last.next = last = ListNode(carry % 10)\n    carry //= 10\n"
             "    l1, l2 = l1 and l1.next, l2 and l2.next\nreturn first.next", "return l1",
             "is_same_list(candidate(l1 = list_node([2, 4]), l2 = list_node([5, 6])),"
             " list_node([7, 0, 1]))"),
        leet("powers", "myPow", "(self, x: float, n: int) -> float", "return x ** n",
             "return x * n", "abs(candidate(x = 2.0, n = 10) - 1024.0) < 1e-5",
             "abs(candidate(x = 2.1, n = 3) - 9.261) < 1e-5"),
        leet("group-anagrams", "groups", "(self, words: List[str]) -> List[List[str]]",
             "found = defaultdict(list)\nfor word in words:\n"
             "    found[''.join(sorted(word))].append(word)\nreturn list(found.values())",
             "return [words]",
             "sorted(map(sorted, candidate(words = ['ab', 'c', 'ba']))) == [['ab', 'ba'], ['c']]"),
        leet("is-palindrome", "isPalindrome", "(self, s: str) -> bool", "return s == s[::-1]",
             "return True", "candidate(s = 'abba') == True", "candidate(s = 'abc') == False"),
        leet("counts", "counts", "(self, s: str) -> Dict[str, int]", "return Counter(s)",
             "return {}", "candidate(s = 'aab') == {'a': 2, 'b': 1}"),
        leet("cycle-free", "middle", "(self, head: Optional[ListNode])",
             "slow = fast = head\nwhile fast and fast.next:\n"
             "    slow, fast = slow.next, fast.next.next\nreturn slow", "return head",
             "is_same_list(candidate(head = list_node([1, 2, 3, 4])), list_node([3, 4]))"),
    )
}  # fmt: skip


def big(number, imports, head, body, wrong, cases, refused="", extra=""):
    """Returns a task of BigCodeBench, a wrong body, and the refusal."""
    code = f"{imports}\ndef task_func{head}:\n"
    test = f"import unittest\n{imports}\n{extra}\nclass TestCases(unittest.TestCase):\n"
    task = f"BigCodeBench/{number}"
    row = {
        "task_id": task,
        "complete_prompt": f'{code}    """Solves task {number}."""\n',
        "instruct_prompt": f"Solve task {number}. Write self-contained code starting with:\n{code}",
        "canonical_solution": _indented(body, 4),
        "code_prompt": code,
        "test": test + _indented(cases, 4),
        "entry_point": "task_func",
        "doc_struct": "{}",
        "libs": "[]",
    }
    return task, (row, f"{code}{_indented(wrong, 4)}", refused)


BIG_CODE_BENCH = dict((
    big(0, "import itertools\nfrom random import seed, shuffle", "(numbers=list(range(1, 3)))",
        "found = [list(p) for p in itertools.permutations(numbers)]\nsums = 0\nfor p in found:\n"
        "    seed(0)\n    shuffle(p)\n    sums += sum(abs(a - b) for a, b in zip(p, p[1:]))\n"
        "return sums / len(found)", "return 0",
        "def test_case_1(self):\n    self.assertIsInstance(task_func(), float)\n"
        "def test_case_2(self):\n    self.assertEqual(task_func([1, 2]), 1.0)"),
    big(1, "import numpy as np", "(rows, columns)", "return np.ones((rows, columns)) * 2",
        "return [[2.0] * columns] * rows",
        "def setUp(self):\n    self.rows = 2\n"
        "def test_shape(self):\n    result = task_func(self.rows, 3)\n"
        "    self.assertEqual(result.shape, (2, 3))\n    self.assertTrue((result == 2).all())\n"
        "def test_type(self):\n    self.assertIsInstance(task_func(1, 1), np.ndarray)\n"
        "    np.testing.assert_array_equal(task_func(1, 2), np.array([[2.0, 2.0]]))"),
    big(2, "import numpy as np", "(values)", "return np.mean(values), np.argmax(values)",
        "return np.float64(0.0), np.int64(0)",
        "def test_mean(self):\n    mean, place = task_func(np.array([1.0, 2.0, 6.0]))\n"
        "    self.assertAlmostEqual(mean, 3.0)\n    self.assertEqual(place, 2)\n"
        "    self.assertEqual(mean.dtype, np.float64)"),
    big(3, "import os\nimport json", "(path)",
        "with open(path) as file:\n    data = json.load(file)\nreturn sorted(data)", "return []",
        "def setUp(self):\n    self.path = 'data.json'\n    with open(self.path, 'w') as file:\n"
        "        json.dump({'b': 1, 'a': 2}, file)\n"
        "def tearDown(self):\n    os.remove(self.path)\n"
        "def test_keys(self):\n    self.assertListEqual(task_func(self.path), ['a', 'b'])\n"
        "def test_missing(self):\n    with self.assertRaises(FileNotFoundError):\n"
        "        task_func('absent.json')"),
    big(4, "import csv\nimport os", "(rows, path)",
        "with open(path, 'w', newline='') as file:\n    csv.writer(file).writerows(rows)\n"
        "return path", "return path",
        "def test_file(self):\n    path = task_func([[1, 2], ['a', 'b']], 'out.csv')\n"
        "    self.assertTrue(os.path.exists(path))\n    with open(path) as file:\n"
        "        self.assertEqual(file.read().split(), ['1,2', 'a,b'])"),
    big(5, "from datetime import datetime, timedelta", "(day, days)",
        "return datetime.fromisoformat(day) + timedelta(days=days)", "return datetime(2020, 1, 1)",
        "def test_day(self):\n    got = task_func('2024-02-28', 2)\n"
        "    self.assertIsInstance(got, datetime)\n"
        "    self.assertEqual((got.month, got.day), (3, 1))\n"
        "    self.assertEqual(got, datetime(2024, 3, 1))"),
    big(6, "from collections import Counter", "(words)", "return Counter(words)",
        "return Counter()",
        "def test_counts(self):\n    got = task_func(['a', 'b', 'a'])\n"
        "    self.assertIsInstance(got, Counter)\n"
        "    self.assertEqual(got.most_common(1), [('a', 2)])\n    self.assertEqual(got['c'], 0)"),
    big(7, "import re", "(text)", "return re.findall(r'\\d+', text)", "return ['7']",
        "def test_subtests(self):\n    for text, wanted in (('a1b22', ['1', '22']), ('x', [])):\n"
        "        with self.subTest(text):\n            self.assertEqual(task_func(text), wanted)"),
    big(8, "import random", "(n)", "return random.randint(0, n)", "return -1",
        "@patch('random.randint', return_value=3)\n"
        "def test_patched(self, randint):\n    self.assertEqual(task_func(9), 3)",
        "test 1 uses patch", "from unittest.mock import patch"),
    big(9, "import a_package_not_here as ml", "(data)", "return ml.fit(data)", "return None",
        "def test_fit(self):\n    self.assertIsNotNone(task_func([1]))", "a_package_not_here"),
    big(10, "import io\nimport sys", "(text)", "print(text)", "return None",
        "def test_print(self):\n    sys.stdout = io.StringIO()\n    task_func('a')\n"
        "    self.assertEqual(sys.stdout.getvalue(), 'a\\n')", "test 1 sets sys.stdout"),
    big(11, "import sqlite3", "(n)",
        "connection = sqlite3.connect(':memory:')\nconnection.execute('CREATE TABLE t (x)')\n"
        "connection.executemany('INSERT INTO t VALUES (?)', [(x,) for x in range(n)])\n"
        "return connection", "return None",
        "def test_rows(self):\n    connection = task_func(3)\n"
        "    rows = connection.execute('SELECT x FROM t').fetchall()\n"
        "    self.assertEqual(rows, [(0,), (1,), (2,)])"),
    big(12, "import sympy", "(text)", "return sympy.sympify(text)", "return 0",
        "def test_sum(self):\n    self.assertEqual(task_func('x + x'), 2 * sympy.Symbol('x'))",
        "compares an object of sympy"),
))  # fmt: skip


def kod(name, solution, wrong, test, refused=""):
    """Returns a row of KodCode, a wrong program, and the refusal."""
    heads = [line for line in solution.split("\n") if line.startswith(("def ", "class "))]
    row = {
        "style": "instruct",
        "subset": "Prefill",
        "question_id": f"Prefill_{name}_I",
        "question": f"Write {name}.",
        "solution": solution,
        "test": test,
        "test_info": [{"function_name": name, "function_declaration": head} for head in heads],
        "gpt_difficulty": "easy",
        "gpt_pass_percentage": 1.0,
    }
    return name, (row, wrong, refused)


KODCODE = dict((
    kod("add", "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a\n",
        "from solution import add\n\ndef test_small():\n    assert add(1, 2) == 3\n\n"
        "def test_texts():\n    assert add('a', 'b') == 'ab'\n"),
    kod("safe_root", "def safe_root(x):\n    if x < 0:\n        raise ValueError('negative')\n"
        "    return x ** 0.5\n", "def safe_root(x):\n    return 2.0\n",
        "import pytest\nfrom solution import safe_root\n\ndef test_root():\n"
        "    assert safe_root(2) == pytest.approx(1.41421356)\n\ndef test_negative():\n"
        "    with pytest.raises(ValueError, match='negative'):\n        safe_root(-1)\n"),
    kod("Stack", "class Stack:\n    def __init__(self):\n        self.items = []\n"
        "    def push(self, item):\n        self.items.append(item)\n    def pop(self):\n"
        "        if not self.items:\n            raise IndexError('empty')\n"
        "        return self.items.pop()\n    def __len__(self):\n        return len(self.items)\n",
        "class Stack:\n    def push(self, item):\n        pass\n"
        "    def pop(self):\n        return 1\n",
        "import pytest\nfrom solution import Stack\n\n@pytest.fixture\ndef stack():\n"
        "    made = Stack()\n    made.push(1)\n    made.push(2)\n    return made\n\n"
        "def test_order(stack):\n    assert stack.pop() == 2\n    assert stack.pop() == 1\n"
        "    assert len(stack) == 0\n\ndef test_empty():\n    with pytest.raises(IndexError):\n"
        "        Stack().pop()\n"),
    kod("squares", "def squares(n):\n    for i in range(n):\n        yield i * i\n",
        "def squares(n):\n    return [0, 1]\n",
        "import types\nfrom solution import squares\n\ndef test_next():\n    made = squares(3)\n"
        "    assert isinstance(made, types.GeneratorType)\n    assert next(made) == 0\n"
        "    assert list(made) == [1, 4]\n"),
    kod("naturals", "import itertools\ndef naturals():\n    return itertools.count(1)\n",
        "def naturals():\n    return iter([1])\n",
        "from itertools import islice\nfrom solution import naturals\n\ndef test_endless():\n"
        "    assert list(islice(naturals(), 3)) == [1, 2, 3]\n"),
    kod("sort_in_place", "def sort_in_place(xs):\n    xs.sort()\n    return len(xs)\n",
        "def sort_in_place(xs):\n    return len(xs)\n",
        "from solution import sort_in_place\n\ndef test_sort():\n    xs = [3, 1, 2]\n"
        "    count = sort_in_place(xs)\n    assert count == 3\n    assert xs == [1, 2, 3]\n"),
    kod("is_even", "def is_even(n):\n    return n % 2 == 0\n", "def is_even(n):\n    return True\n",
        "import pytest\nfrom solution import is_even\n\n@pytest.mark.parametrize('n, expected', [\n"
        "    (2, True), (3, False), pytest.param(0, True, id='zero')])\n"
        "def test_cases(n, expected):\n    assert is_even(n) is expected\n"),
    kod("Account", "class InsufficientFunds(Exception):\n    pass\n\nclass Account:\n"
        "    def __init__(self, balance=0):\n        self.balance = balance\n"
        "    def withdraw(self, amount):\n        if amount > self.balance:\n"
        "            raise InsufficientFunds(f'needs {amount}')\n        self.balance -= amount\n",
        "class InsufficientFunds(Exception):\n    pass\n\nclass Account:\n"
        "    def __init__(self, balance=0):\n        self.balance = 7\n"
        "    def withdraw(self, amount):\n        pass\n",
        "import pytest\nfrom solution import Account, InsufficientFunds\n\nclass TestAccount:\n"
        "    def setup_method(self):\n        self.account = Account(10)\n"
        "    def test_withdraw(self):\n        self.account.withdraw(3)\n"
        "        assert self.account.balance == 7\n    def test_too_much(self):\n"
        "        with pytest.raises(InsufficientFunds) as caught:\n"
        "            self.account.withdraw(11)\n        assert str(caught.value) == 'needs 11'\n"),
    kod("read_numbers", "def read_numbers(path):\n    return [int(x) for x in open(path)]\n",
        "def read_numbers(path):\n    return []\n",
        "from solution import read_numbers\n\ndef test_file(tmp_path):\n"
        "    path = tmp_path / 'numbers.txt'\n    path.write_text('1\\n2\\n')\n"
        "    assert read_numbers(path) == [1, 2]\n"),
    kod("point", "from collections import namedtuple\nPoint = namedtuple('Point', 'x y')\n\n"
        "def mirrored(p):\n    return Point(p[1], p[0])\n", "def mirrored(p):\n    return p\n",
        "import solution\n\ndef test_fields():\n    p = solution.mirrored((1, 2))\n"
        "    assert (p.x, p.y) == (2, 1)\n    assert p == (2, 1)\n"),
    kod("memoize", "def memoize(f):\n    known = {}\n    def wrapped(n):\n"
        "        if n not in known:\n            known[n] = f(n)\n        return known[n]\n"
        "    wrapped.known = known\n    return wrapped\n", "def memoize(f):\n    return f\n",
        "from solution import memoize\n\ndef test_known():\n    wrapped = memoize(abs)\n"
        "    assert wrapped(-3) == 3\n    assert wrapped.known == {-3: 3}\n"),
    kod("fetch",
        "import asyncio\nasync def fetch(n):\n    await asyncio.sleep(0)\n    return n + 1\n",
        "async def fetch(n):\n    return n\n",
        "import asyncio\nfrom solution import fetch\n\ndef test_fetch():\n"
        "    assert asyncio.run(fetch(1)) == 2\n"),
    kod("Vector", "class Vector:\n    def __init__(self, x, y):\n        self.x, self.y = x, y\n"
        "    def __add__(self, v):\n        return Vector(self.x + v.x, self.y + v.y)\n"
        "    def __mul__(self, k):\n        return Vector(self.x * k, self.y * k)\n"
        "    def __repr__(self):\n        return f'Vector({self.x}, {self.y})'\n",
        "class Vector:\n    def __init__(self, x, y):\n        self.x, self.y = x, y\n"
        "    def __add__(self, v):\n        return v\n    __mul__ = __add__\n",
        "from solution import *\n\ndef test_add():\n    v = Vector(1, 2) + Vector(3, 4)\n"
        "    assert (v.x, v.y) == (4, 6)\n    assert isinstance(v, Vector)\n\ndef test_scale():\n"
        "    assert repr(Vector(1, 2) * 3) == 'Vector(3, 6)'\n"),
    kod("Money", "class Money:\n    def __init__(self, n):\n        self.n = n\n"
        "    def __eq__(self, m):\n        return self.n == m.n\n",
        "class Money:\n    def __init__(self, n):\n        pass\n    __eq__ = lambda *a: True\n",
        "from solution import Money\n\ndef test_equal():\n    assert Money(3) == Money(3)\n",
        "compares an object of program.Money"),
    kod("shout", "def shout(text):\n    print(text.upper())\n", "def shout(text):\n    pass\n",
        "from solution import shout\n\ndef test_print(capsys):\n    shout('a')\n"
        "    assert capsys.readouterr().out == 'A\\n'\n", "takes 'capsys'"),
    kod("twice", "def twice(f, x):\n    return f(f(x))\n", "def twice(f, x):\n    return x\n",
        "from solution import twice\n\ndef test_twice():\n"
        "    assert twice(lambda n: n + 1, 1) == 3\n", "a function cannot be handed over"),
))  # fmt: skip
