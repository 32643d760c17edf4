// One chat, whole and streamed, with OpenAI's package for Node, which FOLDER has: node chat.mjs FOLDER URL MODEL QUESTION
import { createRequire } from "node:module";

const [folder, baseURL, model, content] = process.argv.slice(2);
const OpenAI = createRequire(`${folder}/`)("openai");
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const body = { model, messages: [{ role: "user", content }], temperature: 0 };
const answer = await client.chat.completions.create(body);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...body, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
console.log(JSON.stringify({ whole: answer.choices[0].message.content, streamed }));
