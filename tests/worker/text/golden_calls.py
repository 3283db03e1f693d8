# ruff: noqa: E501
"""Texts in every format of calls, and what they are: (kind, text), (call NAME, arguments); "…" = it is cut off."""

NOW = ("call now", "{}")


def text(said: str) -> tuple[str, str]:
    return ("text", said)


def get(arguments: str) -> tuple[str, str]:
    return ("call get", arguments)


def cut_off(arguments: str, name: str = "get") -> tuple[str, str, str]:
    return (f"call {name}", arguments, "…")


J = '<tool_call>\n{"name": "get", "arguments": '
L = '{"name": "get", "parameters": '
F = "<tool_call>\n<function=get>\n"
G = "<|tool_call>call:get{"
H = "<|channel|>commentary to=functions.get <|constrain|>json<|message|>"
D = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
R = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
Q = '<|"|>'

CASES: dict[str, list[tuple[str, list[tuple[str, ...]]]]] = {
    "json_tags": [
        ("Hello  there\n", [text("Hello  there\n")]),
        (J + '{"city": "Zug"}}\n</tool_call>', [get('{"city": "Zug"}')]),
        ("I look.\n\n" + J + "{}}\n</tool_call>\n", [text("I look."), get("{}")]),
        (
            J + '{"a": {"b": [1, {"c": "}"}]}}}\n</tool_call>\n' + J + '{"d": 2}}\n</tool_call>',
            [get('{"a": {"b": [1, {"c": "}"}]}}'), get('{"d": 2}')],
        ),
        (
            J + '{"city": "東京 \\"</tool_call>\\" 👩‍👩‍👧"}}</tool_call>',
            [get('{"city": "東京 \\"</tool_call>\\" 👩‍👩‍👧"}')],
        ),
        ('<tool_call>{"name": "now"}</tool_call>', [NOW]),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', [NOW]),
        ('<tool_call>{"name": "now", "arguments": ""}</tool_call>', [NOW]),
        ('<tool_call>{"arguments": {"city": "a"}, "name": "get"}</tool_call>', [get('{"city": "a"}')]),
        ('<tool_call>{"name": "get", "parameters": {"city": "a"}}</tool_call>', [get('{"city": "a"}')]),
        (
            '<tool_call>{"type": "function", "function": {"name": "get", "arguments": {"days": 1}}, "id": 7}'
            "</tool_call>",
            [get('{"days": 1}')],
        ),
        (
            '<tool_call>{"name": "get", "arguments": "{\\"city\\": \\"a \\\\\\" \\u00e9 \\ud83d\\ude00\\"}"}</tool_call>',
            [get('{"city": "a \\" é 😀"}')],
        ),
        (
            '<tool_call>{"arguments": "{\\"city\\": \\"a\\"}", "name": "get"}</tool_call>',
            [get('{"city": "a"}')],
        ),
        (J + '{"city": "a"}}\n</tool_call>\n and more', [get('{"city": "a"}'), text("and more")]),
        (J + '{"city": "a"}}\n</tool_call> then ' + J + "{}}</tool_call>", [get('{"city": "a"}'), text("then"), get("{}")]),
        (J + '{"city": "a"}</tool_call>', [get('{"city": "a"}')]),  # the outer brace is missing
        (J + '{"city": "a"}}', [get('{"city": "a"}')]),
        (J + '{"city": "a"', [cut_off('{"city": "a"')]),
        (J + '{"city": "a\\u12', [cut_off('{"city": "a\\u12')]),
        (J + '{"city": "\\d"}}\n</tool_call>', [cut_off('{"city": "\\'), text('d"}}\n</tool_call>')]),
        (J + '{"days": 01}}', [cut_off('{"days": 0'), text("1}}")]),
        (J + '{"days": 1,}}', [cut_off('{"days": 1,'), text("}}")]),
        (J + "[1]}\n</tool_call>", [text(J + "[1]}\n</tool_call>")]),
        (J + "bare}\n</tool_call>", [text(J + "bare}\n</tool_call>")]),
        ("<tool_call>\nget the city\n</tool_call>", [text("<tool_call>\nget the city\n</tool_call>")]),
        ("<tool_call>", [text("<tool_call>")]),
        ('<tool_call>{"name": "ge', [text('<tool_call>{"name": "ge')]),
        (
            J + "{}}</tool_call>\n"
            '<tool_call>\n{"name": "no", "arguments": {"x": "<tool_call>"}}\n</tool_call>\n' + J + "{}}</tool_call>",
            [get("{}"), text('<tool_call>\n{"name": "no", "arguments": {"x": "<tool_call>"}}\n</tool_call>'), get("{}")],
        ),
        ("a < b <tool_cal and <tool", [text("a < b <tool_cal and <tool")]),
        ("<tool_call><tool_call>" + J[11:] + "{}}</tool_call>", [text("<tool_call>"), get("{}")]),
    ],
    "llama_json": [
        ("Hello {there}", [text("Hello {there}")]),
        (L + '{"city": "Zug"}}', [get('{"city": "Zug"}')]),
        ("<|python_tag|>" + L + "{}}", [get("{}")]),
        (L + '{"deep": {"a": "}"}}}; {"name": "now", "parameters": {}}', [get('{"deep": {"a": "}"}}'), NOW]),
        (
            '{"type": "function", "name": "get", "parameters": {"city": "é"}}\n',
            [get('{"city": "é"}')],
        ),
        ('{"city": "Zug", "days": 2}', [text('{"city": "Zug", "days": 2}')]),
        ('  {"name": "no", "parameters": {"a": [1]}}', [text('  {"name": "no", "parameters": {"a": [1]}}')]),
        (L + '{"days": x}}', [cut_off('{"days": '), text("x}}")]),
        (L + '{"days": 1', [cut_off('{"days": 1')]),
        ('{"name": "now"', [text('{"name": "now"')]),
        ('<|python_tag|>brave.call(query="a")', [text('<|python_tag|>brave.call(query="a")')]),
        ("{", [text("{")]),
        (L + "{}} and so on", [get("{}"), text("and so on")]),
        ("So: " + L + "{}}", [text("So: " + L + "{}}")]),
    ],
    "mistral": [
        ("Hello [there]", [text("Hello [there]")]),
        ('[TOOL_CALLS][{"name": "get", "arguments": {"city": "Zug"}, "id": "abcdefghi"}]', [get('{"city": "Zug"}')]),
        (
            '[TOOL_CALLS] [{"name": "get", "arguments": {"deep": {"a": "}]"}}}, {"name": "now", "arguments": {}}]',
            [get('{"deep": {"a": "}]"}}'), NOW],
        ),
        (
            'So. [TOOL_CALLS][{"name": "now"}, {"name": "no", "arguments": {}}, {"name": "get", "arguments": {}}]',
            [text("So."), NOW, text(', {"name": "no", "arguments": {}},'), get("{}")],
        ),
        ('[TOOL_CALLS][{"name": "no"}]', [text('[TOOL_CALLS][{"name": "no"}]')]),
        ('[TOOL_CALLS]get[ARGS]{"city": "é"}[TOOL_CALLS]now[ARGS]{}', [get('{"city": "é"}'), NOW]),
        ('[TOOL_CALLS]get[CALL_ID]abc123[ARGS]{"days": 1} ok', [get('{"days": 1}'), text("ok")]),
        ('[TOOL_CALLS]get{"days": 1}', [get('{"days": 1}')]),
        ("[TOOL_CALLS]no[ARGS]{}", [text("[TOOL_CALLS]no[ARGS]{}")]),
        ("[TOOL_CALLS]get[ARGS][1]", [text("[TOOL_CALLS]get[ARGS][1]")]),
        ('[TOOL_CALLS]get[ARGS]{"days": 1', [cut_off('{"days": 1')]),
        ('[TOOL_CALLS][{"name": "get", "arguments": {"a": tru3}}]', [cut_off('{"a": tru'), text("3}}]")]),
        ('[TOOL_CALLS][{"name": "now", "arguments": {}}', [NOW]),
        ("[TOOL_CALL", [text("[TOOL_CALL")]),
        ("[TOOL_CALLS]", [text("[TOOL_CALLS]")]),
    ],
    "function_tags": [
        ("Hello <function>", [text("Hello <function>")]),
        (F + "<parameter=city>\nZug\n</parameter>\n</function>\n</tool_call>", [get('{"city": "Zug"}')]),
        (
            "So.\n\n" + F + "<parameter=city>\n\na <b>\n}\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            [text("So."), get('{"city": "\\na <b>\\n}\\n", "days": 3}'), NOW],
        ),
        ("<function=get><parameter=city>Zug</parameter></function>", [get('{"city": "Zug"}')]),
        (
            F + '<parameter=deep>\n{"a": "}"}\n</parameter>\n<parameter=list>\n[1, 2]\n</parameter>\n</function>',
            [get('{"deep": {"a": "}"}, "list": [1, 2]}')],
        ),
        (F + '<parameter=city>\n2025\n</parameter></function></tool_call>', [get('{"city": "2025"}')]),
        (F + "<parameter=ref>\ntrue\n</parameter></function></tool_call>", [get('{"ref": "true"}')]),
        (
            F + "<parameter=on>\nTrue\n</parameter><parameter=maybe>\nNone\n</parameter>"
            "<parameter=either>\n5\n</parameter><parameter=kind>\na\n</parameter></function>",
            [get('{"on": true, "maybe": null, "either": 5, "kind": "a"}')],
        ),
        (
            F + "<parameter=maybe>\n5\n</parameter><parameter=days>\nmany\n</parameter>"
            "<parameter=other>\n1.50\n</parameter><parameter=ratio>\nNaN\n</parameter></function>",
            [get('{"maybe": "5", "days": "many", "other": 1.50, "ratio": "NaN"}')],
        ),
        (F + '<parameter=city>\n"東京" \\ 👩‍👩‍👧\n</parameter></function>', [get('{"city": "\\"東京\\" \\\\ 👩‍👩‍👧"}')]),
        ("<tool_call>\n<function=no>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
         [text("<tool_call>\n<function=no>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>")]),
        (F + "Zug</function>", [text(F + "Zug</function>")]),
        (F + "<parameter=city>\nZu", [cut_off('{"city": "Zu')]),
        (F + "<parameter=days>\n1", [cut_off("{")]),
        (F + "<parameter=city>\nZug\n</parameter>\noops</function>", [cut_off('{"city": "Zug"'), text("\noops</function>")]),
        ("<tool_call>\n<function=now>\n</function> done", [NOW, text("done")]),
        (F + "</function></tool_call>" + F.replace("get", "no") + "</function></tool_call>\n" + F + "</function></tool_call>",
         [get("{}"), text(F.replace("get", "no") + "</function></tool_call>"), get("{}")]),
        ("<function", [text("<function")]),
        ("<tool_call>\n<function=ge", [text("<tool_call>\n<function=ge")]),
    ],
    "named_function": [
        ("Hello <function ", [text("Hello <function ")]),
        ('<function name="get"><param name="city">Zug</param></function>', [get('{"city": "Zug"}')]),
        (
            'So.\n<function name="get">\n<param name="city"><![CDATA[a\n<b> & }]]></param>\n'
            '<param name="days">3</param>\n</function>\n<function name="now"></function>',
            [text("So."), get('{"city": "a\\n<b> & }", "days": 3}'), NOW],
        ),
        ('<function name="get"><param name="deep"><![CDATA[{"a": "}"}]]></param></function>', [get('{"deep": {"a": "}"}}')]),
        ('<function name="get"><param name="city">12</param></function>', [get('{"city": "12"}')]),
        ('<function name="get"><param name="city">東京 "</param></function>', [get('{"city": "東京 \\""}')]),
        ('<function name="no"><param name="a">1</param></function>',
         [text('<function name="no"><param name="a">1</param></function>')]),
        ('<function name="get">Zug</function>', [text('<function name="get">Zug</function>')]),
        ('<function name="get"><param name="city">Zu', [cut_off('{"city": "Zu')]),
        ('<function name="get"><param name="city"><![CDATA[Zug]]> x', [cut_off('{"city": "Zug"'), text(" x")]),
        ('<function name="now"></function><function name="no"></function><function name="now"></function>',
         [NOW, text('<function name="no"></function>'), NOW]),
        ('<function name="get"><param name="days">1</param>oops', [cut_off('{"days": 1'), text("oops")]),
    ],
    "key_value": [
        ("Hello <tool", [text("Hello <tool")]),
        ("<tool_call>get<arg_key>city</arg_key><arg_value>Zug</arg_value></tool_call>", [get('{"city": "Zug"}')]),
        (
            "So.\n<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>a\n}</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
            [text("So."), get('{"city": "a\\n}", "days": 3}'), NOW],
        ),
        ('<tool_call>get<arg_key>deep</arg_key><arg_value>{"a": "}"}</arg_value></tool_call>', [get('{"deep": {"a": "}"}}')]),
        ("<tool_call>get<arg_key>city</arg_key><arg_value>7</arg_value></tool_call>", [get('{"city": "7"}')]),
        ("<tool_call>get<arg_key>city</arg_key><arg_value>東京</arg_value></tool_call>", [get('{"city": "東京"}')]),
        ("<tool_call>no<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
         [text("<tool_call>no<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>")]),
        ("<tool_call>get the city</tool_call>", [text("<tool_call>get the city</tool_call>")]),
        ("<tool_call>get<arg_key>city</arg_key><arg_value>Zu", [cut_off('{"city": "Zu')]),
        ("<tool_call>get<arg_key>city</arg_key>oops", [cut_off("{"), text("<arg_key>city</arg_key>oops")]),
        ("<tool_call>now</tool_call><tool_call>no</tool_call><tool_call>now</tool_call>",
         [NOW, text("<tool_call>no</tool_call>"), NOW]),
        ("<tool_call>now", [text("<tool_call>now")]),
        ("<tool_call>get<arg_key>list</arg_key><arg_value>[1, 2", [cut_off("{")]),
    ],
    "gemma": [
        ("Hello <|tool", [text("Hello <|tool")]),
        (G + f"city:{Q}Zug{Q}}}<tool_call|>", [get('{"city": "Zug"}')]),
        (
            "So." + G + f"days:3,deep:{{a:{Q}}}, x:1{Q},b:[1,-2.5,true,null]}}}}<tool_call|><|tool_call>call:now{{}}<tool_call|>",
            [text("So."), get('{"days": 3, "deep": {"a": "}, x:1", "b": [1, -2.5, true, null]}}'), NOW],
        ),
        (G + f"city:{Q}a\n\"b\" \\ 東京{Q}}}<tool_call|>", [get('{"city": "a\\n\\"b\\" \\\\ 東京"}')]),
        (G + f"{Q}city{Q}: {Q}Zug{Q}, list: [ ]}}<tool_call|>", [get('{"city": "Zug", "list": []}')]),
        (G + "city:2025,kind:a,deep:{a:7}}<tool_call|>", [get('{"city": "2025", "kind": "a", "deep": {"a": "7"}}')]),
        ("<|tool_call>call:no{a:1}<tool_call|>", [text("<|tool_call>call:no{a:1}<tool_call|>")]),
        ("<|tool_call>get{}<tool_call|>", [text("<|tool_call>get{}<tool_call|>")]),
        (G + f"city:{Q}Zu", [cut_off('{"city": "Zu')]),
        (G + "days:1", [cut_off('{"days": ')]),
        (G + f"city:{Q}a{Q} oops}}", [cut_off('{"city": "a"'), text(" oops}")]),
        (G + f"days:1}}<tool_call|><|tool_call>call:no{{}}<tool_call|>{G}}}<tool_call|>",
         [get('{"days": 1}'), text("<|tool_call>call:no{}<tool_call|>"), get("{}")]),
        (G + "list:[[[1]]],}<tool_call|> done", [get('{"list": [[[1]]]}'), text("done")]),
        (G + "}", [get("{}")]),
    ],
    "pythonic": [
        ("Hello [there]", [text("Hello [there]")]),
        ('[get(city="Zug")]', [get('{"city": "Zug"}')]),
        ("[get(city='it\\'s', days=3), now()]", [get('{"city": "it\'s", "days": 3}'), NOW]),
        ('[get(deep={"a": "})]"}, list=[1, -2, (3,)], on=True, maybe=None)]',
         [get('{"deep": {"a": "})]"}, "list": [1, -2, [3]], "on": true, "maybe": null}')]),
        ("[get(city='東京 \\u00e9 \\x41 \\U0001f600 \\d\\n')]", [get('{"city": "東京 \\u00e9 \\u0041 \\ud83d\\ude00 \\\\d\\n"}')]),
        ("[get(ratio=1e3, other=.5, days=1_000)]", [get('{"ratio": 1e3, "other": 0.5, "days": 1000}')]),
        ("[now(), no(a='x)', b=[1]), now()]", [NOW, text(", no(a='x)', b=[1]),"), NOW]),
        ("[no()]", [text("[no()]")]),
        ("[1] and [2]", [text("[1] and [2]")]),
        ("[get(days=__import__('os'))]", [cut_off('{"days": '), text("__import__('os'))]")]),
        ("[get(city='Zu", [cut_off('{"city": "Zu')]),
        ("[get(", [cut_off("{")]),
        ("[now()", [NOW]),
        ("[get(days=1) oops]", [get('{"days": 1}'), text("oops]")]),
        ("[get('Zug')]", [cut_off("{"), text("'Zug')]")]),
        ("[now()]\nDone.", [NOW, text("Done.")]),
    ],
    "lfm2": [
        ("Hello [now()]", [text("Hello [now()]")]),
        ('<|tool_call_start|>[get(city="Zug")]<|tool_call_end|>', [get('{"city": "Zug"}')]),
        ('<|tool_call_start|>[get(city="Zug"), now()]<|tool_call_end|>Checking.', [get('{"city": "Zug"}'), NOW, text("Checking.")]),
        ("<|tool_call_start|>[no()]<|tool_call_end|>", [text("<|tool_call_start|>[no()]<|tool_call_end|>")]),
        ("<|tool_call_start|>now()<|tool_call_end|>", [text("<|tool_call_start|>now()<|tool_call_end|>")]),
        ("<|tool_call_start|>[now()]", [NOW]),
        ("<|tool_call_start|>[now()]<|tool_call_e", [NOW]),
        ("a <|tool_call_start|>[now()]<|tool_call_end|> b <|tool_call_start|>[now()]<|tool_call_end|>",
         [text("a"), NOW, text("b"), NOW]),
        ("<|tool_call_start|>[get(city='", [cut_off('{"city": "')]),
        ("<|tool_call_", [text("<|tool_call_")]),
    ],
    "harmony": [
        ("<|channel|>final<|message|>Hello <b>  ", [text("Hello <b>  ")]),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
         [("reasoning", "Hm."), text("Hi")]),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + H + '{"city": "Zug"}<|call|>',
         [("reasoning", "Hm."), get('{"city": "Zug"}')]),
        (" to=functions.get<|channel|>commentary json<|message|>{\"city\": \"Zug\"}", [get('{"city": "Zug"}')]),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + H + "{}<|end|><|start|>assistant"
         "<|channel|>analysis<|message|>Now?<|end|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}",
         [text("I look."), get("{}"), ("reasoning", "Now?"), NOW]),
        (H + '{"deep": {"a": "}<|call|>", "é": [1]}}<|call|>', [get('{"deep": {"a": "}<|call|>", "é": [1]}}')]),
        ("<|channel|>commentary to=functions.no<|message|>{}<|call|>", [text("<|channel|>commentary to=functions.no<|message|>{}")]),
        (H + "Zug<|call|>", [text(H + "Zug")]),
        (H + '{"days": x}<|call|>', [cut_off('{"days": '), text("x}")]),
        (H + '{"days": 1', [cut_off('{"days": 1')]),
        ("<|channel|>analysis<|message|>Hm", [("reasoning", "Hm")]),
        ("<|channel|>ana", []),
        ("Hello <|x|> there", [text("Hello <|x|> there")]),
        ("<|channel|>commentary to=functions.g", [text("<|channel|>commentary to=functions.g")]),
    ],
    "deepseek": [
        ("Hello <｜tool", [text("Hello <｜tool")]),
        (D + 'get<｜tool▁sep｜>{"city": "Zug"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', [get('{"city": "Zug"}')]),
        ("So.\n" + D + 'get<｜tool▁sep｜>{"deep": {"a": "}"}}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
         "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [text("So."), get('{"deep": {"a": "}"}}'), NOW]),
        (R + 'get\n```json\n{"city": "é"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
         "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [get('{"city": "é"}'), NOW]),
        (D + "no<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
         [text(D + "no<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>")]),
        (D + "now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>no<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
         "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
         [NOW, text("<｜tool▁call▁begin｜>no<｜tool▁sep｜>{}<｜tool▁call▁end｜>"), NOW]),
        (D + 'get<｜tool▁sep｜>{"city": "Zu', [cut_off('{"city": "Zu')]),
        (D + "get<｜tool▁sep｜>{]", [cut_off("{"), text("]")]),
        (D + "get<｜tool▁sep｜>Zug", [text(D + "get<｜tool▁sep｜>Zug")]),
        (R + "get\n{}", [text(R + "get\n{}")]),
        (D + "now<｜tool▁sep｜>{}", [NOW]),
        (D + "now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜> ok", [NOW, text("ok")]),
    ],
}  # fmt: skip
