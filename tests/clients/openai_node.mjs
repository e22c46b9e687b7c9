// The official JavaScript client of OpenAI's API.
import assert from "node:assert/strict";
import { readFile, writeFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(join(process.env.EVENFLOW_PACKAGES, "package.json"));
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")));

const model = process.env.EVENFLOW_MODEL_NAME;
const client = new OpenAI({ baseURL: `${process.env.EVENFLOW_ADDRESS}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "What is the capital of France?" }];

const checks = {
  async "a chat is answered"() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 12, temperature: 0 });
    assert.match(answer.choices[0].message.content, /Paris/);
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  },
  async "a chat is streamed, with its usage at the end"() {
    const options = { include_usage: true };
    const stream = await client.chat.completions.create({
      model, messages, max_tokens: 12, temperature: 0, stream: true, stream_options: options,
    });
    let text = "";
    let usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.match(text, /Paris/);
    assert.ok(usage.completion_tokens > 0);
  },
  async "the stream helper accumulates the answer"() {
    const stream = client.chat.completions.stream({ model, messages, max_tokens: 12, temperature: 0 });
    const final = await stream.finalChatCompletion();
    assert.match(final.choices[0].message.content, /Paris/);
  },
  async "a stream that is left early ends"() {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 500, stream: true });
    for await (const chunk of stream) if (chunk.choices[0]?.delta?.content) break;
    assert.ok(stream.controller.signal.aborted);
  },
  async "completions are answered whole and streamed"() {
    const asked = { model, prompt: ["One", "Two"], max_tokens: 3, temperature: 0 };
    const whole = await client.completions.create(asked);
    const texts = ["", ""];
    for await (const chunk of await client.completions.create({ ...asked, stream: true })) {
      texts[chunk.choices[0].index] += chunk.choices[0].text;
    }
    assert.deepEqual(texts, whole.choices.map((choice) => choice.text));
  },
  async "a required tool is called"() {
    const parameters = { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"] };
    const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
    const answer = await client.chat.completions.create({
      model, messages, tools, tool_choice: "required", max_tokens: 80, temperature: 0,
    });
    const [call] = answer.choices[0].message.tool_calls;
    assert.equal(call.function.name, "get_weather");
    assert.ok("city" in JSON.parse(call.function.arguments));
  },
  async "a response is whole, streamed and continued"() {
    const asked = { model, input: messages[0].content, max_output_tokens: 12, temperature: 0 };
    const whole = await client.responses.create(asked);
    assert.match(whole.output_text, /Paris/);
    let text = "", last;
    for await (const event of await client.responses.create({ ...asked, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
      last = event;
    }
    assert.equal(text, whole.output_text);
    assert.equal(last.response.usage.output_tokens, whole.usage.output_tokens);
    const next = await client.responses.create({ model, input: "And?", previous_response_id: whole.id, max_output_tokens: 4 });
    assert.ok(next.usage.input_tokens > whole.usage.input_tokens);
    await client.responses.delete(whole.id);
    await assert.rejects(client.responses.retrieve(whole.id), OpenAI.NotFoundError);
  },
  async "a required tool of a response is called"() {
    const parameters = { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"] };
    const stream = client.responses.stream({
      model, input: "What is the weather in Paris?", tool_choice: "required", max_output_tokens: 80, temperature: 0,
      tools: [{ type: "function", name: "get_weather", parameters, strict: false }],
    });
    const [call] = (await stream.finalResponse()).output;
    assert.equal(call.name, "get_weather");
    assert.ok("city" in JSON.parse(call.arguments));
  },
  async "errors are of the client's own classes"() {
    const create = (changes) => client.chat.completions.create({ model, messages, ...changes });
    await assert.rejects(create({ model: "no-such-model" }), OpenAI.NotFoundError);
    await assert.rejects(create({ temperature: 3 }), OpenAI.BadRequestError);
    await assert.rejects(create({ messages: [], stream: true }), OpenAI.BadRequestError);
  },
  async "models are listed"() {
    const names = [];
    for await (const card of client.models.list()) names.push(card.id);
    assert.ok(names.includes(model));
  },
  async "the documentation's snippets run"() {
    let number = 0;
    for (const page of ["README.md", "docs/server.md"]) {
      const text = await readFile(new URL(`../../${page}`, import.meta.url), "utf-8");
      for (const [, code] of text.matchAll(/```javascript\n(.*?)```/gs)) {
        // Beside the packages, so that it finds them.
        const file = join(process.env.EVENFLOW_PACKAGES, `snippet-${number++}.mjs`);
        const here = code.replaceAll("http://127.0.0.1:8000", process.env.EVENFLOW_ADDRESS);
        await writeFile(file, here.replaceAll('"default"', JSON.stringify(model)));
        await import(pathToFileURL(file));
      }
    }
    assert.ok(number >= 2);
  },
};

let numFailed = 0;
for (const [name, check] of Object.entries(checks)) {
  let outcome = "ok";
  try {
    await check();
  } catch (error) {
    outcome = "FAILED";
    numFailed += 1;
    console.error(error);
  }
  console.log(`  ${outcome.padEnd(6)} ${name}`);
}
console.log(`${Object.keys(checks).length - numFailed} passed, ${numFailed} failed`);
process.exit(numFailed > 0 ? 1 : 0);
