// One chat with OpenAI's package for Node, which FOLDER has: whole, streamed, parsed and as a response.
//   node chat.mjs FOLDER URL MODEL QUESTION
import { createRequire } from "node:module";

const [folder, baseURL, model, content] = process.argv.slice(2);
const require = createRequire(`${folder}/`);
const OpenAI = require("openai");
const { zodResponseFormat } = require("openai/helpers/zod");
const { z } = require("zod");
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const body = { model, messages: [{ role: "user", content }], temperature: 0 };

const answer = await client.chat.completions.create(body);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...body, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
const code = z.object({ month: z.enum(["May", "June"]), code: z.literal(471) });
const parsed = await client.chat.completions.parse({ ...body, response_format: zodResponseFormat(code, "code") });
const response = await client.responses.create({ model, input: content, temperature: 0 });
let responseStreamed = "";
for await (const event of await client.responses.create({ model, input: content, temperature: 0, stream: true })) {
  if (event.type === "response.output_text.delta") responseStreamed += event.delta;
}
console.log(JSON.stringify({
  whole: answer.choices[0].message.content,
  streamed,
  parsed: parsed.choices[0].message.parsed,
  response: response.output_text,
  responseStreamed,
}));
