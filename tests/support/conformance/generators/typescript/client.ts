// What a user writes with the generated types: it compiles only if optional fields are optional and enums have names.
import type { components, operations, webhooks } from "./api.js";

type Schemas = components["schemas"];

export const prepare: Schemas["PrepareRequest"] = { group: "shop", messages: [{ topic: "orders", value: "paid" }] };
export const end: Schemas["EndRequest"] = { outcome: "commit" };
export const key: Schemas["KeyRequest"] = { kind: "group", name: "shop" };
export const rotation: Schemas["RotateRequest"] = {};
export const group: operations["putGroup"]["requestBody"]["content"]["application/json"] = {
  check: { urls: ["http://shop:9000/check"] },
  topics: ["orders"],
};

type Question = webhooks["check"]["post"]["requestBody"]["content"]["application/json"];

export function answer(question: Question): Schemas["CheckAnswer"] {
  return { outcome: "commit", nonce: question.nonce };
}
