"""Assertions that show both sides when they fail, each side computed once."""
import ast
import builtins

NAMES = "abcdefgh" # of the sides of a comparison


def compared(source, comparison, *sides):
    "What a comparison gives; an AssertionError with its sides where it fails."
    result = eval(comparison, dict(zip(NAMES, sides)))
    if not result:
        shown = " and ".join(repr(side)[:400] for side in sides)
        raise AssertionError(f"{source}, with {shown}")
    return result


builtins._compared = compared # by this name whatever a cell defines


class BothSides(ast.NodeTransformer):
    "For `shell.ast_transformers`: `assert x == y` becomes `assert _compared('x == y', 'a == b', x, y)`."
    def visit_Assert(self, node):
        if node.msg is None:
            node.msg = ast.Constant(ast.unparse(node.test)[:400]) # where there are no sides
            node.test = self.condition(node.test)
        return ast.fix_missing_locations(node)

    def condition(self, test):
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            test.values = [self.condition(each) for each in test.values]
        if not isinstance(test, ast.Compare):
            return test
        sides, (first, *rest) = [test.left, *test.comparators], map(ast.Name, NAMES)
        comparison = ast.Compare(first, test.ops, rest[:len(test.ops)])
        words = [ast.Constant(ast.unparse(each)) for each in (test, comparison)]
        return ast.Call(ast.Name("_compared", ast.Load()), words + sides, [])
