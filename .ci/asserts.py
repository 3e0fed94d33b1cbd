"""Assertions that show both sides when they fail, each side computed once."""
import ast
import builtins


def compared(source, compare, *sides):
    "What a comparison gives; an AssertionError with its sides where it fails."
    result = compare(*sides)
    if not result:
        shown = " and ".join(repr(side)[:400] for side in sides)
        raise AssertionError(f"{source}, with {shown}")
    return result


builtins._compared = compared # by this name whatever a cell defines


class BothSides(ast.NodeTransformer):
    "For `shell.ast_transformers`: `assert a == b` becomes `assert _compared(...)`."
    def visit_Assert(self, node):
        if node.msg is None:
            if not isinstance(node.test, ast.Compare): # no sides: its source
                node.msg = ast.Constant(ast.unparse(node.test)[:400])
            node.test = self.condition(node.test)
        return ast.fix_missing_locations(node)

    def condition(self, test):
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            test.values = [self.condition(each) for each in test.values]
        if not isinstance(test, ast.Compare):
            return test
        source, sides = ast.unparse(test), [test.left, *test.comparators]
        names = [f"side_{i}" for i in range(len(sides))]
        call = ast.parse(f"_compared({source!r}, lambda {', '.join(names)}: 0)", mode="eval").body
        loads = [ast.Name(name, ast.Load()) for name in names]
        call.args[1].body = ast.Compare(loads[0], test.ops, loads[1:])
        call.args += sides
        return ast.copy_location(call, test)
