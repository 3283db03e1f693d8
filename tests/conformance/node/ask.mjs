// OpenAI's package for Node asks a server for a part of the features: node ask.mjs URL MODEL [FEATURE]
// Prints a line of JSON: {feature: "" or what went wrong}.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model, only] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "the cat" }];
const asked = { model, messages, temperature: 0, seed: 7, max_completion_tokens: 24 };
const schema = {
  type: "object",
  properties: { on: { type: "boolean" } },
  required: ["on"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "set_lamp", parameters: schema } }];

async function streamed(fields) {
  const found = { text: "", reason: "", usage: null, calls: [] };
  const stream = await client.chat.completions.create({
    ...asked,
    ...fields,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    found.usage = chunk.usage ?? found.usage;
    for (const choice of chunk.choices) {
      found.text += choice.delta.content ?? "";
      found.reason = choice.finish_reason ?? found.reason;
      for (const call of choice.delta.tool_calls ?? []) {
        found.calls[call.index] ??= { name: call.function.name, arguments: "" };
        found.calls[call.index].arguments += call.function.arguments ?? "";
      }
    }
  }
  return found;
}

const features = {
  "plain text": async () => {
    const whole = await client.chat.completions.create(asked);
    const pieces = await streamed({});
    assert.ok(whole.choices[0].message.content);
    assert.equal(pieces.text, whole.choices[0].message.content);
    assert.equal(pieces.reason, whole.choices[0].finish_reason);
    assert.equal(pieces.usage.total_tokens, whole.usage.total_tokens);
  },
  "stop strings": async () => {
    const { text } = await streamed({ max_completion_tokens: 40 });
    const stop = text.slice(7, 16);
    const stopped = await streamed({ max_completion_tokens: 40, stop });
    assert.equal(stopped.text, text.slice(0, text.indexOf(stop)));
    assert.equal(stopped.reason, "stop");
  },
  "JSON schema": async () => {
    const response_format = { type: "json_schema", json_schema: { name: "it", schema, strict: true } };
    const whole = await client.chat.completions.parse({
      ...asked,
      response_format,
      max_completion_tokens: 200,
    });
    assert.equal(typeof JSON.parse(whole.choices[0].message.content).on, "boolean");
  },
  "tools required": async () => {
    const fields = { tools, tool_choice: "required", parallel_tool_calls: false, max_completion_tokens: 200 };
    const whole = await client.chat.completions.create({ ...asked, ...fields });
    const pieces = await streamed(fields);
    const [call] = whole.choices[0].message.tool_calls;
    assert.equal(pieces.calls.length, 1);
    assert.deepEqual(pieces.calls[0], { name: "set_lamp", arguments: call.function.arguments });
    assert.equal(typeof JSON.parse(call.function.arguments).on, "boolean");
    assert.equal(pieces.reason, "tool_calls");
  },
  "the package's own stream": async () => {
    const runner = client.chat.completions.stream(asked);
    const final = await runner.finalChatCompletion();
    const whole = await client.chat.completions.create(asked);
    assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
  },
  completions: async () => {
    const fields = { model, prompt: "the cat", temperature: 0, max_tokens: 12, echo: true };
    const whole = await client.completions.create(fields);
    let text = "";
    for await (const chunk of await client.completions.create({ ...fields, stream: true }))
      text += chunk.choices[0]?.text ?? "";
    assert.ok(text.startsWith("the cat"));
    assert.equal(text, whole.choices[0].text);
  },
  responses: async () => {
    const fields = { model, input: "the cat", temperature: 0, max_output_tokens: 12 };
    const whole = await client.responses.create(fields);
    const final = await client.responses.stream(fields).finalResponse();
    assert.ok(whole.output_text);
    assert.equal(final.output_text, whole.output_text);
    const next = await client.responses.create({ ...fields, input: "and", previous_response_id: whole.id });
    assert.ok(next.usage.input_tokens > whole.usage.input_tokens);
    assert.equal((await client.responses.retrieve(whole.id)).output_text, whole.output_text);
    await client.responses.delete(whole.id);
  },
  embeddings: async () => {
    const found = await client.embeddings.create({ model, input: ["the cat", "a hat"] });
    assert.equal(found.data[0].embedding.length, found.data[1].embedding.length);
    assert.ok(found.data[0].embedding.length > 1);
  },
  models: async () => {
    for await (const each of client.models.list())
      assert.equal((await client.models.retrieve(each.id)).id, each.id);
  },
  "classes of errors": async () => {
    const unknown = client.chat.completions.create({ ...asked, model: "no-such-model" });
    await assert.rejects(unknown, OpenAI.NotFoundError);
    const bad = client.chat.completions.create({ ...asked, temperature: -3, stream: true });
    await assert.rejects(bad, OpenAI.BadRequestError);
  },
};

const told = {};
for (const [name, check] of Object.entries(features)) {
  if (only && only !== name) continue;
  told[name] = await check().then(
    () => "",
    (error) => String(error.message ?? error).split("\n")[0],
  );
}
console.log(JSON.stringify(told));
