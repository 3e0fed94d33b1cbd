"""Assertions that show both sides when they fail, each side computed once."""
import ast
import builtins


def sides(source, *values):
    "The message of a failed comparison."
    shown = [text if len(text) < 400 else text[:400] + " ..." for text in map(repr, values)]
    return f"{source}, with " + " and ".join(shown)


builtins._sides_of_assertion = sides # by this name whatever a cell defines


class BothSides(ast.NodeTransformer):
    "For `shell.ast_transformers`: `assert a == b` becomes two assignments and an assertion."
    def visit_Assert(self, node):
        if node.msg is None and isinstance(node.test, ast.BoolOp) and isinstance(
                node.test.op, ast.And):
            parts = [ast.copy_location(ast.Assert(each), each) for each in node.test.values]
            return [new for part in parts for new in self.as_list(self.visit(part))]
        if node.msg is not None or not isinstance(node.test, ast.Compare):
            return node
        operands = [node.test.left, *node.test.comparators]
        names = [f"_side_{i}" for i in range(len(operands))]
        loads = [ast.Name(name, ast.Load()) for name in names]
        text = ast.Constant(ast.unparse(node.test))
        message = ast.Call(ast.Name("_sides_of_assertion", ast.Load()), [text, *loads], [])
        comparison = ast.Compare(loads[0], node.test.ops, loads[1:])
        new = [ast.Assign([ast.Name(name, ast.Store())], operand)
               for name, operand in zip(names, operands)]
        new.append(ast.Assert(comparison, message))
        return [ast.fix_missing_locations(ast.copy_location(each, node)) for each in new]

    def as_list(self, nodes):
        return nodes if isinstance(nodes, list) else [nodes]
