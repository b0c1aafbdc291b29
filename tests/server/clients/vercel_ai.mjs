import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [url, call, again, parameters] = process.argv.slice(2);
const model = createOpenAICompatible({ name: "jaxspec", baseURL: url, includeUsage: true })("scripted");
const measure_rain = tool({
  description: "Measure the rain.",
  inputSchema: jsonSchema(JSON.parse(parameters)),
  execute: async ({ city, days }) => `${city}: ${42 * days} mm`,
});
const options = { model, tools: { measure_rain }, stopWhen: stepCountIs(3), maxRetries: 0 };
const question = { role: "user", content: call };
const first = await generateText({ ...options, messages: [question] });
const history = [question, ...first.response.messages, { role: "user", content: again }];
const second = streamText({ ...options, messages: history });
console.log(JSON.stringify([first.text, await second.text]));
