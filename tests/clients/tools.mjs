// A chat whose tool calls OpenAI's package for Node, which FOLDER has, runs by itself; the tool answers with REPORT:
//   node tools.mjs FOLDER URL MODEL QUESTION REPORT
import { createRequire } from "node:module";

const [folder, baseURL, model, content, report] = process.argv.slice(2);
const OpenAI = createRequire(`${folder}/`)("openai");
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = [];
const weather = {
  name: "weather",
  description: "The weather at a place.",
  parameters: { type: "object", properties: { place: { type: "string" } }, required: ["place"] },
  parse: JSON.parse,
  function: ({ place }) => (asked.push(place), report),
};
for (const stream of [false, true]) {
  const messages = [{ role: "user", content }];
  const tools = [{ type: "function", function: weather }];
  const runner = client.chat.completions.runTools({ model, messages, stream, tools, temperature: 0 });
  asked.push(await runner.finalContent());
}
console.log(JSON.stringify(asked));
