// Encodes and decodes every message of golden.json, and derives its digest, keys and checksums; prints what differs.
const path = require("node:path");
const examples = path.join(__dirname, "../../examples/node");
const { checksum } = require(path.join(examples, "kvstored.js"));
const identity = require(path.join(examples, "identity.js"));
const protoLoader = require("@grpc/proto-loader");
const golden = require("../../proto/kvstored/v1/golden.json");

const proto = path.join(__dirname, "../../proto/kvstored/v1/kvstored.proto");
const definition = protoLoader.loadSync(proto, { keepCase: true, longs: String, enums: String, bytes: String });
const methods = definition["kvstored.v1.Kvstored"];

async function main() {
  const differ = [];
  golden.messages.forEach((entry, i) => {
    const method = methods[entry.method];
    const [encode, decode] = entry.side === "request"
      ? [method.requestSerialize, method.requestDeserialize]
      : [method.responseSerialize, method.responseDeserialize];
    if (encode(entry.json).toString("hex") !== entry.hex) differ.push(`${i} ${entry.method} ${entry.side}: encoded`);
    const decoded = JSON.stringify(sorted(decode(Buffer.from(entry.hex, "hex"))));
    if (decoded !== JSON.stringify(sorted(entry.json))) differ.push(`${i} ${entry.method} ${entry.side}: decoded ${decoded}`);
  });
  const { facts } = golden;
  const opened = golden.messages.find((e) => e.method === "OpenNamespace" && e.side === "response");
  const whole = protoLoader.loadSync(proto, { keepCase: true, longs: String, enums: String, defaults: true });
  const { namespace } = whole["kvstored.v1.Kvstored"].OpenNamespace.responseDeserialize(Buffer.from(opened.hex, "hex"));
  const digest = identity.digest(namespace);
  const root = identity.root(digest, facts.extra_keys);
  const keys = identity.blockKeys(root, facts.tokens, facts.block_tokens).map((key) => key.toString("hex"));
  const sums = await Promise.all(facts.data.map(async (data) => (await checksum(Buffer.from(data, "hex"))).toString(16).padStart(16, "0")));
  if (digest.toString("hex") !== facts.digest) differ.push(`digest ${digest.toString("hex")}`);
  if (root.toString("hex") !== facts.root) differ.push(`root ${root.toString("hex")}`);
  if (String(keys) !== String(facts.keys)) differ.push(`keys ${keys}`);
  if (String(sums) !== String(facts.checksums)) differ.push(`checksums ${sums}`);
  return { messages: golden.messages.length, differ };
}

const sorted = (value) => {
  if (Array.isArray(value)) return value.map(sorted);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.keys(value).sort().map((name) => [name, sorted(value[name])]));
};

main().then((told) => console.log(JSON.stringify(told)));
