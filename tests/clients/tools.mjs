// A chat whose tool calls OpenAI's package for Node, which FOLDER has, runs by itself: node tools.mjs FOLDER URL MODEL QUESTION
import { createRequire } from "node:module";

const [folder, baseURL, model, content] = process.argv.slice(2);
const OpenAI = createRequire(`${folder}/`)("openai");
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = [];
const weather = {
  name: "weather",
  description: "The weather of a city.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  parse: JSON.parse,
  function: ({ city }) => (asked.push(city), `sun in ${city}`),
};
for (const stream of [false, true]) {
  const messages = [{ role: "user", content }];
  const runner = client.chat.completions.runTools({ model, messages, stream, tools: [{ type: "function", function: weather }] });
  asked.push(await runner.finalContent());
}
console.log(JSON.stringify(asked));
