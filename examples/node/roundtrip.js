// node roundtrip.js 127.0.0.1:7439: opens a namespace, puts three blocks, matches them and reads them back.
const { Client, checksum } = require("./kvstored.js");
const identity = require("./identity.js");

const BLOCK_TOKENS = 16;
const BLOCK_BYTES = 3 << 20; // more than one message of a stream

async function main(address) {
  const client = new Client(address);
  await client.open("node example");
  const opened = await client.call("OpenNamespace", { namespace: {
    model: "node-example", revision: "r1", dtype: "bfloat16", layout: "nhd", layout_version: 1, block_tokens: BLOCK_TOKENS,
    groups: [{ name: "kv", kind: "LINEAR", bytes_per_block: BLOCK_BYTES }],
  } });
  const digest = identity.digest(opened.namespace);

  const tokens = Array.from({ length: 2 * BLOCK_TOKENS + 5 }, (_, i) => (i * 2654435761) % 4294967296);
  const keys = identity.blockKeys(identity.root(digest, ["salt"]), tokens, BLOCK_TOKENS);
  const lastTokens = tokens.length % BLOCK_TOKENS;
  const sizes = [BLOCK_BYTES, BLOCK_BYTES, Math.ceil((BLOCK_BYTES * lastTokens) / BLOCK_TOKENS)];
  const blocks = sizes.map((size, i) => Buffer.alloc(size).map((_, at) => (at * 31 + i) % 251));

  const before = await client.match(opened.digest, keys, lastTokens);
  const status = await client.put(opened.digest, keys, blocks, lastTokens);
  const after = await client.match(opened.digest, keys, lastTokens);
  const read = await client.get(opened.digest, keys);
  const strange = await client.get(opened.digest, [keys[0], Buffer.alloc(32)]);
  await client.close();
  return {
    digest: opened.digest.toString("hex"),
    own_digest: digest.toString("hex"),
    tokens,
    keys: keys.map((key) => key.toString("hex")),
    checksums: await Promise.all(blocks.map(async (block) => (await checksum(block)).toString())),
    hit_tokens: [Number(before.hit_tokens), Number(after.hit_tokens)],
    status,
    is_equal: read.map((block, i) => block !== null && block.equals(blocks[i])),
    miss: strange[1] === null && strange[0] !== null,
  };
}

main(process.argv[2]).then((facts) => console.log(JSON.stringify(facts, null, 1)), (error) => {
  console.error(error);
  process.exitCode = 1;
});
