import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.Semaphore;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicLongArray;
import java.util.concurrent.locks.LockSupport;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Load program for RocketMQ's timer messages, on its Java client. Arguments and lines are those of bench/peers/go/load;
 * WINDOW messages are under way, sent by THREADS threads. A payload begins with its due time and its number.
 */
public final class Load {
    static final String TOPIC = "bench";
    /** Every broker has it; new topics are made where it is. */
    static final String KNOWN_TOPIC = "TBW102";
    static final int QUEUES = 8;
    static final int CREATE_TRIES = 120;
    static final int THREADS = 4;
    static final int MESSAGES_MAX = 1 << 26;
    static final int HEAD_BYTES = 16;
    /** Longer than for the others: the JVMs compile meanwhile. */
    static final double WARM_SECONDS = 5;
    static final double WARM_RATE = 2_000;
    static final long DRAIN_MS = 40_000;
    static final long ARRIVED_MS = 10;
    static final int ERRORS_SHOWN = 3;
    static final int SEND_TIMEOUT_MS = 30_000;
    static final int PULLED = 64;
    static final int TAKEN = 32;
    static final int QUEUE_MESSAGES_MAX = 10_000;

    final double seconds;
    final double rate;
    final int bytes;
    final int window;
    final boolean delivers;
    final DefaultMQProducer producer = new DefaultMQProducer("bench_producer");

    final Bits accepted = new Bits();
    final Bits delivered = new Bits();
    final AtomicLong numbered = new AtomicLong();
    final AtomicLong acceptedCount = new AtomicLong();
    final AtomicLong failedCount = new AtomicLong();
    final AtomicLong deliveredCount = new AtomicLong();
    final AtomicLong repeatedCount = new AtomicLong();
    volatile long from;
    long beganMs;
    final Map<Long, Long> late = new TreeMap<>();
    final Map<Long, Long> arrived = new TreeMap<>();

    /** A bit for each message number. */
    static final class Bits {
        final AtomicLongArray words = new AtomicLongArray(MESSAGES_MAX / 64);

        /** Whether it was clear before. */
        boolean set(long place) {
            long bit = 1L << (place & 63);
            return (words.getAndUpdate((int) (place >>> 6), word -> word | bit) & bit) == 0;
        }
    }

    Load(String[] arguments) {
        delivers = arguments[0].equals("deliver");
        seconds = Double.parseDouble(arguments[1]);
        rate = Double.parseDouble(arguments[2]);
        bytes = Math.max(HEAD_BYTES, Integer.parseInt(arguments[3]));
        window = Integer.parseInt(arguments[6]);
        producer.setNamesrvAddr(arguments[4]);
        producer.setRetryTimesWhenSendFailed(0);
        producer.setRetryTimesWhenSendAsyncFailed(0);
        producer.setSendMsgTimeout(SEND_TIMEOUT_MS);
        producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
    }

    public static void main(String[] arguments) throws Exception {
        Load load = new Load(arguments);
        load.producer.start();
        load.create();
        if (load.delivers) {
            load.consume(arguments[4]);
        }
        load.run();
        System.exit(0);
    }

    /**
     * Makes the topic. Right after its start the broker is not known to the name server yet; and the broker may say that
     * it could not make a topic that it has: whoever can send to it has it.
     */
    void create() throws Exception {
        for (int tries = 1; ; tries++) {
            MQClientException refused = null;
            try {
                producer.createTopic(KNOWN_TOPIC, TOPIC, QUEUES, Map.of());
            } catch (MQClientException error) {
                refused = error;
            }
            try {
                producer.fetchPublishMessageQueues(TOPIC);
                return;
            } catch (MQClientException error) {
                if (tries == CREATE_TRIES) {
                    throw refused == null ? error : refused;
                }
                Thread.sleep(1_000);
            }
        }
    }

    void run() throws Exception {
        produce(Math.min(WARM_SECONDS, seconds), delivers && rate == 0 ? WARM_RATE : rate);
        if (delivers) {
            drain();
        }
        tell("BEGIN");
        begin();
        long began = System.nanoTime();
        produce(seconds, rate);
        double sent = (System.nanoTime() - began) / 1e9;
        if (delivers) {
            drain();
        }
        tell("END");
        synchronized (this) {
            System.out.printf(
                    "RESULT {\"accepted\": %d, \"failed\": %d, \"sent_s\": %s, \"delivered\": %d, \"repeats\": %d, "
                            + "\"missing\": %d, \"late_ms\": %s, \"arrived_10ms\": %s}%n",
                    acceptedCount.get(), failedCount.get(), Double.toString(sent), deliveredCount.get(),
                    repeatedCount.get(), delivers ? missing() : 0, json(late), json(arrived));
        }
        System.out.flush();
    }

    /** Prints a word, and waits for the answer: a line, once the processor time of this moment has been read. */
    static void tell(String word) throws IOException {
        System.out.println(word);
        if (System.in.read() < 0) {
            throw new IOException("nobody reads this");
        }
    }

    synchronized void begin() {
        from = numbered.get();
        for (AtomicLong count : List.of(acceptedCount, failedCount, deliveredCount, repeatedCount)) {
            count.set(0);
        }
        late.clear();
        arrived.clear();
        beganMs = System.currentTimeMillis();
    }

    void produce(double forSeconds, double atRate) throws InterruptedException {
        Semaphore slots = new Semaphore(window);
        AtomicLong turns = new AtomicLong();
        long began = System.nanoTime();
        Thread[] threads = new Thread[THREADS];
        for (int place = 0; place < THREADS; place++) {
            threads[place] = new Thread(() -> {
                while (true) {
                    long at = began + (long) (atRate > 0 ? turns.getAndIncrement() / atRate * 1e9 : 0);
                    for (long wait; (wait = at - System.nanoTime()) > 0; ) {
                        LockSupport.parkNanos(wait);
                    }
                    if (System.nanoTime() - began >= forSeconds * 1e9) {
                        return;
                    }
                    slots.acquireUninterruptibly();
                    send(slots);
                }
            });
            threads[place].start();
        }
        for (Thread thread : threads) {
            thread.join();
        }
        slots.acquire(window);
    }

    void send(Semaphore slots) {
        long number = numbered.getAndIncrement();
        long first = delivers ? 2_000 : 3_600_000;
        long width = delivers ? 1_000 : 86_400_000;
        long due = System.currentTimeMillis() + first + ThreadLocalRandom.current().nextLong(width);
        byte[] payload = new byte[bytes];
        ByteBuffer.wrap(payload).putLong(due).putLong(number);
        Message message = new Message(TOPIC, payload);
        message.setDeliverTimeMs(due);
        try {
            producer.send(message, new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    if (result.getSendStatus() == SendStatus.SEND_OK) {
                        accepted.set(number);
                        acceptedCount.incrementAndGet();
                    } else {
                        failed(result.getSendStatus());
                    }
                    slots.release();
                }

                @Override
                public void onException(Throwable error) {
                    failed(error);
                    slots.release();
                }
            });
        } catch (Exception error) {
            failed(error);
            slots.release();
        }
    }

    void failed(Object reason) {
        if (failedCount.incrementAndGet() <= ERRORS_SHOWN) {
            System.err.println(reason);
        }
    }

    void consume(String address) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("bench_consumer");
        consumer.setNamesrvAddr(address);
        // By default a new group leaves out what came before it had looked at a queue: the first messages.
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeMessageBatchMaxSize(TAKEN);
        consumer.setPullBatchSize(PULLED);
        consumer.setPullThresholdForQueue(QUEUE_MESSAGES_MAX);
        consumer.setConsumeThreadMin(THREADS);
        consumer.setConsumeThreadMax(THREADS);
        consumer.subscribe(TOPIC, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            take(messages);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
    }

    synchronized void take(List<MessageExt> messages) {
        long now = System.currentTimeMillis();
        for (MessageExt message : messages) {
            ByteBuffer payload = ByteBuffer.wrap(message.getBody());
            long due = payload.getLong();
            long number = payload.getLong();
            if (!delivered.set(number)) {
                repeatedCount.incrementAndGet();
            } else if (number >= from) {
                deliveredCount.incrementAndGet();
                late.merge(now - due, 1L, Long::sum);
                arrived.merge((now - beganMs) / ARRIVED_MS, 1L, Long::sum);
            }
        }
    }

    /** How many accepted messages have not been delivered. */
    long missing() {
        long count = 0;
        for (int place = 0; place < MESSAGES_MAX / 64; place++) {
            count += Long.bitCount(accepted.words.get(place) & ~delivered.words.get(place));
        }
        return count;
    }

    void drain() throws InterruptedException {
        long end = System.currentTimeMillis() + DRAIN_MS;
        while (System.currentTimeMillis() < end && (deliveredCount.get() < acceptedCount.get() || missing() > 0)) {
            Thread.sleep(5);
        }
    }

    static String json(Map<Long, Long> counts) {
        return counts.entrySet().stream()
                .map(entry -> "\"" + entry.getKey() + "\": " + entry.getValue())
                .collect(Collectors.joining(", ", "{", "}"));
    }
}
