"""What tests of answers may rely on, though answer and tests run in two processes, and whose names they use."""

from __future__ import annotations

import pytest

from evenflow.evals.sandbox import Limits, run_program
from evenflow.evals.task_names import task_names

CHECK = """
METADATA = {'author': 'jt'}

def check(candidate):
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.3) == True
    assert candidate([1.0, 2.0, 5.9, 4.0, 5.0], 0.05) == False

check(has_close_elements)
"""
HAS_CLOSE = """
def has_close_elements(numbers: List[float], threshold: float) -> bool:
    return any(abs(a - b) < threshold for i, a in enumerate(numbers) for b in numbers[:i])
"""
PAIR = """
class Pair(object):
    def __init__(self, a, b):
        self.a = a
        self.b = b
def max_chain_length(arr, n):
    return sum(pair.b > pair.a for pair in arr[:n])
"""
NODE = """
class Node:
    def __init__(self, data):
        self.data = data
        self.left = self.right = None
        self.children = []
    def __eq__(self, other):
        return isinstance(other, Node) and self.data == other.data
    def __hash__(self):
        return hash(self.data)
def depth(root):
    return 0 if root is None else 1 + max(depth(root.left), depth(root.right))
def count(root):
    return 1 + sum(map(count, root.children))
def make(data):
    return Node(data)
"""
STACK = """
class Stack:
    def __init__(self):
        self.items = []
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        if not self.items:
            raise Empty("nothing", 7)
        return self.items.pop()
    def __len__(self):
        return len(self.items)
    def __contains__(self, item):
        return item in self.items
    def __enter__(self):
        return self
    def __exit__(self, *error):
        return error[0] is Empty
class Empty(Exception):
    code = 3
"""
MONEY = """
class Money:
    def __init__(self, cents):
        self.cents = cents
    def __add__(self, other):
        return Money(self.cents + (other.cents if isinstance(other, Money) else other))
    __radd__ = __add__
    def __eq__(self, other):
        return self.cents == getattr(other, "cents", other)
    def __lt__(self, other):
        return self.cents < other.cents
    def __repr__(self):
        return f"Money({self.cents})"
"""
ACCEPTED = {
    "the style of HumanEval": ("from typing import List\n" + HAS_CLOSE, CHECK),
    "collections of all kinds": (
        "from collections import *\n"
        "def f(): return [Counter('aab'), defaultdict(list, a=[1]), OrderedDict(b=2), deque([1], 3), {1: {2, 3}}, "
        "(1, b'x', frozenset({1}), range(3), 2j, None, ..., float('inf'), 10 ** 5000, 'é\\ud800', bytearray(b'y'))]",
        "a = f()\nassert a == [{'a': 2, 'b': 1}, {'a': [1]}, {'b': 2}, a[3], {1: {2, 3}}, (1, b'x', frozenset({1}), "
        "range(3), 2j, None, ..., float('inf'), 10 ** 5000, 'é\\ud800', bytearray(b'y'))]\n"
        "assert list(a[2]) == ['b'] and list(a[3]) == [1] and a[3].maxlen == 3\n"
        "assert a[0].most_common(1) == [('a', 2)] and a[1]['new'] == []\n"
        "assert isinstance(a[0], dict) and type(a[5][5]) is type(None)",
    ),
    "values of the library": (
        "import datetime, decimal, fractions\n"
        "def f(): return decimal.Decimal('1.10'), fractions.Fraction(1, 3), datetime.date(2020, 2, 29), "
        "datetime.datetime(2020, 2, 29, 1), datetime.timedelta(days=1)",
        "import datetime, decimal, fractions\nassert f() == (decimal.Decimal('1.1'), fractions.Fraction(1, 3), "
        "datetime.date(2020, 2, 29), datetime.datetime(2020, 2, 29, 1), datetime.timedelta(days=1))",
    ),
    "sets, iterators and views of results": (
        "def f(n):\n    yield from range(n)\ndef g(d): return d.keys()\ndef h(x): return map(abs, x)",
        "assert set(f(3)) == {0, 1, 2}\nassert list(f(2)) == [0, 1]\nassert 1 in f(3) and 5 not in f(3)\n"
        "it = f(2)\nassert next(it) == 0 and sum(it) == 1\nassert g({1: 2}) == {1}\n"
        "assert sorted(h([-2, 1])) == [1, 2]",
    ),
    "numbers that are close": (
        "def f(x): return x / 3\ndef g(a): return sum(a) / len(a)",
        "import math\nassert math.isclose(f(1), 1 / 3)\n"
        "assert abs(g([1, 2]) - 1.5) < 1e-6\nassert round(f(2), 2) == 0.67",
    ),
    "built-in errors": (
        "def f(x):\n    if x < 0: raise ValueError('negative', x)\n    return [1][x]",
        "try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert error.args == ('negative', -1)\n"
        "try:\n    f(5)\n    assert False\nexcept IndexError as error:\n    assert 'out of range' in str(error)",
    ),
    "its own errors and objects": (
        STACK,
        "s = Stack()\ns.push(1).push([2])\nassert len(s) == 2 and 1 in s and 5 not in s and s.items == [1, [2]]\n"
        "assert s.pop() == [2] and s.pop() == 1 and not s\n"
        "try:\n    s.pop()\n    assert False\nexcept Empty as e:\n    assert e.code == 3 and e.args == ('nothing', 7)\n"
        "    assert isinstance(e, Exception) and '7' in str(e)\n"
        "assert isinstance(s, Stack) and not isinstance(3, Stack) and issubclass(Empty, Exception)\n"
        "s.items.append(9)\nassert s.pop() == 9\ns.extra = {}\ns.extra['a'] = 1\nassert s.extra == {'a': 1}\n"
        "with Stack() as other:\n    other.pop()",
    ),
    "a class of a test of MBPP": (
        PAIR,
        "assert max_chain_length([Pair(5, 24), Pair(15, 25),Pair(27, 40), Pair(50, 60)], 4) == 4",
    ),
    "trees that a test builds": (
        NODE,
        "root = Node(1)\nroot.left = Node(2)\nroot.left.right = Node(3)\nassert depth(root) == 3\n"
        "root.children.append(Node(5))\nroot.children[0].children.append(Node(6))\nassert count(root) == 3\n"
        "assert root.left.data == 2 and root.left.left is None and root.left is root.left\n"
        "assert Node(1) == Node(1) and Node(1) != Node(2) and len({Node(1), Node(1)}) == 1\n"
        "assert make(3).data == 3 and make(3) != 3\nimport copy\nother = copy.deepcopy(root)\nother.left.data = 9\n"
        "assert root.left.data == 2 and other.left.data == 9",
    ),
    "arguments that are changed": (
        "def f(x):\n    x.sort()\n    x[0][0].append(5)\n    return x\ndef g(d): d['a'].add(1); d['self'] = d",
        "x = [[[2], 1], [[3]]]\ny = f(x)\nassert y is x and x == [[[2, 5], 1], [[3]]]\n"
        "d = {'a': set()}\ng(d)\nassert d['a'] == {1} and d['self'] is d",
    ),
    "functions that go in and come out": (
        "def adder(n): return lambda x: x + n\ndef apply(f, *a, **k): return f(*a, **k)\n"
        "def total(items): return sum(item for item in items)\ndef memo(f):\n    seen = {}\n    def inner(x):\n"
        "        if x not in seen: seen[x] = f(x)\n        return seen[x]\n    return inner",
        "assert adder(3)(4) == 7\nassert apply(lambda a, b=0: a - b, 5, b=2) == 3\nassert apply(len, [1, 2]) == 2\n"
        "assert apply(int, '12') == 12 and apply(str.upper, 'a') == 'A'\nassert total(n for n in range(4)) == 6\n"
        "calls = []\nslow = memo(lambda x: calls.append(x) or x * 2)\nassert slow(2) == slow(2) == 4 and calls == [2]\n"
        "def fails(): raise KeyError('own')\ntry:\n    apply(fails)\n    assert 0\nexcept KeyError as e:\n"
        "    assert e.args == ('own',)",
    ),
    "errors of the tests": (
        "def fail(kind): raise kind('why', 1)",
        "class Own(Exception):\n    pass\ntry:\n    fail(Own)\n    assert 0\nexcept Own as error:\n"
        "    assert error.args == ('why', 1)",
    ),
    "a dictionary that asks a function for what it lacks": (
        "import collections\ndef f(): return collections.defaultdict(lambda: [7])",
        "found = f()\nassert found['a'] == [7] and list(found) == ['a']",
    ),
    "objects of the tests": (
        "def rename(thing):\n    thing.name = thing.name.upper()\n    thing.next.items.append(len(thing))\n"
        "    return thing",
        "class Thing:\n    def __init__(self, name):\n        self.name, self.next, self.items = name, None, []\n"
        "    def __len__(self): return 4\na = Thing('a')\na.next = Thing('b')\n"
        "assert rename(a) is a and a.name == 'A' and a.next.items == [4]",
    ),
    "operators of a class": (
        MONEY,
        "assert Money(1) + Money(2) == Money(3)\nassert Money(1) < Money(2)\nassert repr(Money(4)) == 'Money(4)'\n"
        "assert sorted([Money(2), Money(1)])[0].cents == 1\nassert max(Money(1), Money(5)) == Money(5)",
    ),
    "what is printed": (
        "def f(x): print('got', x)",
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    f(3)\n"
        "assert out.getvalue() == 'got 3\\n'",
    ),
    "coroutines": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x",
        "import asyncio\nassert asyncio.run(f(4)) == 4",
    ),
    "named tuples, enumerations, subclasses of built-in classes": (
        "import collections, enum\nP = collections.namedtuple('P', 'x y')\ndef p(): return P(1, [2])\n"
        "class Color(enum.Enum):\n    RED = 1\nclass N(enum.IntEnum):\n    ONE = 1\nclass L(list):\n    def top(self): "
        "return self[-1]\ndef red(): return Color.RED\ndef make(): return L([1, 2])\ndef one(): return N.ONE",
        "assert p() == (1, [2]) and p().y == [2]\n"
        "assert red() == Color.RED and red() is Color.RED and Color.RED.value == 1\n"
        "assert make() == [1, 2] and make().top() == 2 and make() != [1] and list(make()) == [1, 2]\nassert one() == 1",
    ),
    "files": (
        "def lines(path): return len(open(path).readlines())\ndef save(path): open(path, 'w').write('hi')",
        "with open('in.txt', 'w') as file:\n    file.write('a\\nb\\n')\nassert lines('in.txt') == 2\n"
        "save('out.txt')\nassert open('out.txt').read() == 'hi'",
    ),
    "a function named as a built-in one": ("def sum(a, b): return a * b", "assert sum(10, 15) == 150"),
    "a function named as a module": ("def select(x): return x", "assert select(1) == 1"),
    "values": ("LIMIT = 5\ntable = {'a': [1]}", "assert LIMIT == 5 and table['a'][0] == 1"),
    "unittest": (
        "def f(x): return x + 1",
        "import unittest\nclass Test(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 2)\n"
        "        self.assertRaises(TypeError, f, 'a')\n"
        "assert unittest.defaultTestLoader.loadTestsFromTestCase(Test).run(unittest.TestResult()) or True\n"
        "result = unittest.TestResult()\nTest('test').run(result)\nassert result.wasSuccessful(), result.errors",
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_right_answers_do_is_accepted(name: str) -> None:
    program, tests = ACCEPTED[name]
    assert run_program(program, tests, Limits()).verdict == (True, "")


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_same_tests_fail_without_the_answer(name: str) -> None:
    assert not run_program("", ACCEPTED[name][1], Limits()).verdict.is_correct


def test_a_class_that_the_task_declares_has_all_its_operators() -> None:
    tests = "assert Money(1) + 2 == 3\nassert 2 + Money(1) == Money(3)\nassert Money(7) == 7 and Money(7) != 8"
    assert run_program(MONEY, tests, Limits(), prefix="class Money:\n    ").verdict == (True, "")


def test_names_of_the_task_are_not_the_answers() -> None:
    prefix = (
        "import math\nfrom os.path import join\n\ndef poly(xs, x):\n    return sum(xs) * x\n\n"
        'def find_zero(xs):\n    """Find it.\n    """\n'
    )
    tests = (
        "import random\ndef check(candidate):\n    global seen\n    seen = abs(poly([1], candidate([1])))\n    "
        "assert math.fabs(seen) < 1e-4 and time.time() and other\ncheck(find_zero)\ncount = 1\ncount += 1"
    )
    found = task_names(prefix, tests)
    assert found.names == ["find_zero", "other", "poly"]
    assert found.modules == {"math": ["fabs"], "time": ["time"]}
    assert [helper.partition("(")[0] for helper in found.helpers] == [
        "import math",
        "from os.path import join",
        "def poly",
    ]
    assert (found.built_ins, found.declared, found.classes) == ([], [], [])
    assert task_names("def f(x):", "assert sum(1, 2) == abs(3)").built_ins == ["abs", "sum"]
    assert task_names("class A:\n  def f(self):", "A().f()").declared == ["A"]


def test_a_name_with_a_capital_letter_is_a_class_or_a_function() -> None:
    def classes(tests: str) -> list[str]:
        return task_names("", tests).classes

    assert classes("s = Stack()\nassert s.pop() == 1 and 3 in s\nassert Stack().push(1).pop() == 1") == ["Stack"]
    assert classes("assert Money(1) + Money(2) == Money(3)\nassert depth(Node(1)) == 1") == ["Money", "Node"]
    assert classes("assert Split([1, 2]) == [1]") == []
    assert classes("assert abs(Average([1, 2]) - 1.5) < 1e-6\nassert 3 in Extract([3])") == []
    assert classes("assert add(1) == 2") == []
