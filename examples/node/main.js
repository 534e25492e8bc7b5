// Schedule a message and consume it from Node. Usage: node main.js [host:port,...]
// Nothing but the .proto files is needed; they import each other as tickwheel/proto/*.proto.
'use strict';
const fs = require('node:fs');
const os = require('node:os');
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const addresses = (process.argv[2] || '127.0.0.1:7700').split(',');
const root = fs.mkdtempSync(path.join(os.tmpdir(), 'tickwheel-proto-'));
const folder = path.join(root, 'tickwheel', 'proto');
fs.cpSync(path.join(__dirname, '..', '..', 'proto'), folder, { recursive: true });
const files = ['scheduler', 'consumer', 'admin'].map((name) => `tickwheel/proto/${name}.proto`);
const definition = loader.loadSync(files, { includeDirs: [root], keepCase: true, longs: String, enums: String });
const tickwheel = grpc.loadPackageDefinition(definition).tickwheel.v1;
fs.rmSync(root, { recursive: true });

const call = (client, method, request) =>
  new Promise((resolve, reject) => {
    const deadline = Date.now() + 5000;
    client[method](request, { deadline }, (error, answer) => (error ? reject(error) : resolve(answer)));
  });

// Any node knows who the master is.
async function findMaster() {
  for (;;) {
    for (const address of addresses) {
      const admin = new tickwheel.Admin(address, grpc.credentials.createInsecure());
      try {
        const status = await call(admin, 'GetStatus', {});
        if (status.master_address) return status.master_address;
      } catch (error) {
        console.error(`${address}: ${error.message}`);
      } finally {
        admin.close();
      }
    }
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}

async function main() {
  const master = await findMaster();
  const scheduler = new tickwheel.Scheduler(master, grpc.credentials.createInsecure());
  // With a producer id and a sequence the call may be repeated after a lost answer.
  const receipt = await call(scheduler, 'Schedule', {
    producer_id: `node-${process.pid}-${Date.now()}`,
    sequence: 1,
    message: { topic: 'from-node', payload: Buffer.from('hello from Node'), delay_ms: 200 },
  });
  console.log(`scheduled ${receipt.id.wheel_group}-${receipt.id.hour}-${receipt.id.index}`);

  // A master that does not answer is noticed after seconds; TCP alone can take minutes.
  const keepalive = { 'grpc.keepalive_time_ms': 10000, 'grpc.keepalive_timeout_ms': 3000 };
  const consumer = new tickwheel.Consumer(master, grpc.credentials.createInsecure(), keepalive);
  const stream = consumer.Consume();
  stream.write({ open: { group: 'node-readers', topics: ['from-node'], credits: 10 } });
  stream.on('error', (error) => {
    console.error(error.message);
    process.exitCode = 1;
  });
  stream.on('data', (response) => {
    if (response.deliver) {
      const batch = response.deliver;
      let offset = 0;
      for (let row = 0; row < batch.ids.length / 8; row += 1) {
        const meta = batch.meta_sizes.length ? batch.meta_sizes.readUInt32LE(4 * row) : 0;
        const size = batch.sizes.readUInt32LE(4 * row);
        console.log(`received ${batch.records.subarray(offset + meta, offset + size)}`);
        offset += size;
      }
      const { group, topic, ids, attempts, positions } = batch;
      stream.write({ settle: { sequence: 1, group, topic, outcome: 'ACK', ids, attempts, positions } });
    } else if (response.settled) {
      console.log(`settled ${response.settled.settled}`);
      stream.end();
      scheduler.close();
      consumer.close();
    }
  });
}

main().catch((error) => {
  console.error(error.message);
  process.exitCode = 1;
});
