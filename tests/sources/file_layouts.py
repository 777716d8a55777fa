"""Source files in which a method `C.f` that binds its argument to `y` stands in various ways."""

from __future__ import annotations

from textwrap import dedent

LAYOUTS: dict[str, str | bytes] = {
    "tabs": "class C:\n\tdef f(self, x):\n\t\tif x:\n\t\t\ty = x\n\t\treturn y\n",
    "form feeds": "\f\nclass C:\n\f    def f(self, x):\n        y = x\n        return y\n\f\n",
    "carriage returns": "class C:\r\n    def f(self, x):\r\n        y = x\r\n        return y\r\n",
    "no last newline": "class C:\n    def f(self, x):\n        y = x\n        return y",
    "first line": "def f(self, x):\n    y = x\n    return y\nclass C: f = f\n",
    "byte order mark": b"\xef\xbb\xbfdef f(self, x):\n    y = x\n    return y\nclass C: f = f\n",
    "latin-1": (
        b"# coding: latin-1\nclass C:\n    def f(self, x):\n"
        b"        y = x if '\xe9' else 0\n        return y\n"
    ),
}

TEXTS = {
    "one line": """
        class C:
            def f(self, x): y = x; return y
            def g(self): return 1
        """,
    "comments at the left": """
        class C:
            def f(self, x):
        # here
                y = x
        # and here
                return y
        # end
        """,
    "brackets at the left": """
        class C:
            def f(self, x):
                y = max(
        x, x,
        )
                return (
                    y
        )
            g = 1
        """,
    "text at the left": """
        class C:
            def f(self, x):
                '''Text
        at the left.'''
                y = x
                return y
                '''Dead text
        def f(self, x):
            pass
        '''
        z = 1
        """,
    "dead end": """
        class C:
            def f(self, x):
                y = x
                return y
                z = y
        """,
    "decorators over lines": """
        def d(*a, **k):
            return lambda f: f

        class C:
            @d(
                1,

                key=lambda x: 1,
            )
            # between
            @d()
            def f(self, x):
                y = x
                return y
        """,
    "defaults and annotations": """
        T = 3
        class C:
            def f(self, x, a=(lambda: 1), *, b: 'T' = T) -> T:
                y: T = x
                return y
        """,
    "future annotations": """
        from __future__ import annotations
        class C:
            def f(self, x: Nope) -> Nope:
                y: Nope = x
                return y
        """,
    "in a branch": """
        class C:
            if True:
                for _ in [1]:
                    def f(self, x):
                        y = x
                        return y
        """,
    "in a function": """
        def make(k):
            class C:
                def f(self, x):
                    y = x + k - k
                    return y
            return C
        C = make(3)
        """,
    "in a class in a class": """
        class A:
            class C:
                def f(self, x):
                    y = x if C else 0
                    return y
        C = A.C
        """,
    "in a class made global": """
        def make():
            global C
            class C:
                def f(self, x):
                    y = x if C else 0
                    return y
        make()
        """,
    "imports of all kinds": """
        import os.path, math as m
        from decimal import Decimal
        from math import floor as g
        try:
            import json
        except ImportError:
            json = None
        plain = m
        class C:
            def f(self, x):
                y = x + m.floor(0.5) + plain.floor(0.5)
                json.dumps(x), os.path.join('a'), Decimal.from_float(1.0), g(1)
                [m.ceil(0) for _ in [1]], (lambda: plain.ceil(0))()
                return y
        """,
    "import under the name of a local": """
        import math
        class C:
            def f(self, x):
                math = [x]
                y = math.pop()
                return y
        """,
    "import inside": """
        class C:
            def f(self, x):
                import math
                y = math.floor(x)
                return y
        """,
    "super": """
        class B:
            def f(self, x):
                return x
        class C(B):
            def f(self, x):
                y = super().f(x)
                z = [super(C, self).f(x) for _ in [1]]
                return y
        """,
    "super mentioned outside": """
        builtin = super
        class B:
            def f(self, x):
                return x
        class C(B):
            def f(self, x):
                y = super().f(x)
                return y
        """,
    "private class": """
        class __C:
            __k = 0
            def f(self, x):
                y = x + self.__k
                return y
        C = __C
        """,
    "warnings": r"""
        class C:
            def f(self, x):
                y = x if x is 5 else x
                '\d'
                return y
        """,
    "constants": """
        class C:
            def f(self, x):
                y = x + 0.0 + -0.0 if x in {1, 'a', 2.0, None} else x
                return y or (1, (True, 1.0), -1j, 1e400, 1e400 - 1e400, ..., b'a')
        """,
}

LAYOUTS |= {name: dedent(text).lstrip("\n") for name, text in TEXTS.items()}
